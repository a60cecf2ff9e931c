"""Turning tokens into text while they arrive: no half characters, no half stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextCursor:
    """The text of one sample as it grows. `push` returns what may be shown now; text that could still turn into a
    stop string, or a character whose bytes are not all there, is held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str], eos_ids: Sequence[int], stops: Sequence[str]) -> None:
        self.stopped = False
        self.matched: str | None = None  # the stop string that ended the text
        self._decode = decode
        self._eos = frozenset(eos_ids)
        self._stops = [stop for stop in stops if stop]
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1
        self._ids: list[int] = []
        self._shown = 0  # characters handed out
        self._text = ""  # characters decoded for good
        self._window = (0, 0)  # tokens [a, b) already in `_text`; decoding starts at a so that spacing is right

    @property
    def text(self) -> str:
        """Everything so far: without stop strings, and whole after `finish`."""
        return self._text

    def push(self, token: int) -> str:
        """Add a token. Sets `stopped` when a stop string is complete; the text then ends before it."""
        if self.stopped or token in self._eos:
            return ""
        self._ids.append(token)
        start, end = self._window
        piece = self._decode(self._ids[start:])
        if not piece.endswith(REPLACEMENT):
            self._append(piece[len(self._decode(self._ids[start:end])) :])
            self._window = (end, len(self._ids))
        return self._show(self._hold)

    def finish(self) -> str:
        """The rest of the text once no token follows."""
        start, end = self._window
        if not self.stopped and end < len(self._ids):
            self._append(self._decode(self._ids[start:])[len(self._decode(self._ids[start:end])) :])
        return self._show(0)

    def _append(self, piece: str) -> None:
        # A stop string can begin in what was held back, at most `_hold` characters before the new piece.
        search_from = max(0, len(self._text) - self._hold)
        self._text += piece
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop, search_from)) >= 0]
        if found:
            at, self.matched = min(found)
            self._text = self._text[:at]
            self.stopped = True

    def _show(self, hold: int) -> str:
        end = len(self._text) if self.stopped else max(self._shown, len(self._text) - hold)
        piece = self._text[self._shown : end]
        self._shown = end
        return piece
