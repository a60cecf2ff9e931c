"""Text while it arrives: no half characters, no half stop strings, the same text in the end."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sprawl.rollout.text import TextCursor

EOS = 256


def decode_bytes(ids: Sequence[int]) -> str:
    """Byte-level tokens, the hardest case: a character can take four of them."""
    return bytes(ids).decode("utf-8", errors="replace")


@given(text=st.text(alphabet="ab\nü€😀", max_size=30), stops=st.lists(st.sampled_from(["a", "\n\n", "ab\n", "€", ""])))
def test_pieces_add_up_to_the_text_before_the_first_stop(text: str, stops: list[str]) -> None:
    cursor = TextCursor(decode_bytes, [EOS], stops)
    pieces = []
    for token in text.encode():
        pieces.append(cursor.push(token))
        if cursor.stopped:
            break
    else:
        cursor.push(EOS)
    pieces.append(cursor.finish())
    ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    shown = "".join(pieces)
    assert shown == cursor.text
    if ends:
        # The stop string that is complete first ends the text.
        completed = min(text.find(stop) + len(stop) for stop in stops if stop and stop in text)
        assert cursor.stopped
        assert shown == text[: min(at for at in ends if at < completed)]
    else:
        assert shown == text
        assert not cursor.stopped
    assert "\N{REPLACEMENT CHARACTER}" not in shown


def test_a_character_whose_bytes_never_complete_is_shown_at_the_end() -> None:
    cursor = TextCursor(decode_bytes, [EOS], [])
    assert [cursor.push(token) for token in "a€".encode()[:-1]] == ["a", "", ""]
    assert cursor.finish() == "\N{REPLACEMENT CHARACTER}"
