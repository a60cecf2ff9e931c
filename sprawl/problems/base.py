"""What a problem set is: prompts, a split into training and held-out problems, and an exact verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Problem:
    """One prompt and the answer its verifier wants. `index` is its place in the training or held-out order."""

    index: int
    prompt: str
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)


class ProblemSet(Protocol):
    """Prompts plus a rule-based verifier.

    `train(i)` depends on (seed, i) only, so a restarted run sees the same problems, and never returns a held-out
    problem. Which problems are held out does not depend on the seed: accuracies of different runs compare.
    """

    @property
    def name(self) -> str: ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a response (besides the tokenizer's EOS): any token containing one may stop sampling."""

    def train(self, index: int) -> Problem: ...

    def heldout(self, count: int) -> list[Problem]:
        """At most `count` distinct held-out problems, always the same ones; fewer when the set is small."""

    def score(self, problem: Problem, response: str) -> float:
        """0.0 to 1.0 for a response decoded without EOS. Exact, and never raises whatever the response is."""


@runtime_checkable
class ToolProblemSet(ProblemSet, Protocol):
    """A problem set whose problems take several turns: what the policy writes may be answered by a tool.

    `score` is given the policy's last turn. `stop` strings end a turn.
    """

    @property
    def max_turns(self) -> int:
        """Turns of the policy after which an episode ends."""

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        """What the policy reads after its turns so far; None ends the episode. Depends on its arguments only, and
        never raises whatever the turns are."""


class Decoding(Protocol):
    """The part of a tokenizer that turning tokens into a response needs."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def decode(self, ids: list[int]) -> str: ...


def response_text(tokenizer: Decoding, token_ids: Sequence[int]) -> str:
    """The text a verifier scores: sampled tokens up to the first EOS.

    Other stop tokens stay in: one such as `".\\n"` carries text that the verifier has to see.
    """
    ids = list(token_ids)
    end = next((position for position, token in enumerate(ids) if token in tokenizer.eos_ids), len(ids))
    return tokenizer.decode(ids[:end])
