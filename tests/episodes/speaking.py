"""An engine that speaks: what it writes is a function of what it reads, in the character tokenizer's alphabet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sprawl.rollout.engine import Watch
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.rows import Row
from sprawl.rollout.wire import Sample, SamplingParams
from tests.rollout.support import EOS, character_tokenizer

TOKENIZER = character_tokenizer()


class SpeakingEngine(FakeEngine):
    """`speak(text read)` is the text written, followed by the end of the text. Log-probs count down by a quarter."""

    def __init__(self, speak: Callable[[str], str]) -> None:
        super().__init__()
        self.speak = speak
        self.read: list[str] = []

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, watch: Watch | None = None
    ) -> list[Sample]:
        text = TOKENIZER.decode(list(input_ids))
        self.read.append(text)
        assert self.version is not None
        rows = [Row() for _ in range(params.n)]
        for index, row in enumerate(rows):
            for at, token in enumerate([*TOKENIZER.encode(self.speak(text)), EOS]):
                row.push(token, -0.25 * at, self.version, [EOS, *params.stop_token_ids], params.max_new_tokens)
                if watch is not None and watch(index, token, -0.25 * at):
                    row.finished = "stop"
                if row.finished is not None:
                    break
        return [row.sample() for row in rows]


def adds_step_by_step(read: str) -> str:
    """Reads `1+2+3=`, asks for 1+2, then for 3+3, then says 6. Results end in a blank."""
    question, _, rest = read.partition("=")
    terms = question.split("+")
    results = rest.count(" ")
    if results < len(terms) - 1:
        so_far = terms[0] if not results else rest.split(" ")[-2].rpartition("=")[2]
        return f"{so_far}+{terms[results + 1]}=never said"
    return rest.split(" ")[-2].rpartition("=")[2]
