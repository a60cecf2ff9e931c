"""Character-level addition: `12+34=` wants `046` and then the end of the text."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from pydantic import Field

from sprawl.config import Section
from sprawl.problems.base import Problem
from sprawl.problems.draw import Operation, Operations


class AdditionParams(Section):
    digits: Annotated[int, Field(ge=1, le=6)] = Field(2, description="Digits of each operand, zero-padded.")
    heldout_share: Annotated[float, Field(gt=0, le=0.5)] = Field(0.1, description="Share of pairs never trained on.")


class Addition:
    """Operands and answer are zero-padded, the answer to one digit more. Only that exact text is paid."""

    name = "addition"
    stop: tuple[str, ...] = ()

    def __init__(self, seed: int, params: AdditionParams) -> None:
        self._seed = seed
        self._digits = params.digits
        self._operations = Operations(self.name, params.digits, "+", params.heldout_share)

    def train(self, index: int) -> Problem:
        return self._problem(index, self._operations.draw(self._seed, index))

    def heldout(self, count: int) -> list[Problem]:
        chosen = islice(self._operations.heldout(), count)
        return [self._problem(index, operation) for index, operation in enumerate(chosen)]

    def score(self, problem: Problem, response: str) -> float:
        return float(response == problem.answer)

    def _problem(self, index: int, operation: Operation) -> Problem:
        prompt = f"{operation.left:0{self._digits}d}+{operation.right:0{self._digits}d}="
        answer = f"{operation.result:0{self._digits + 1}d}"
        return Problem(index, prompt, answer, {"left": operation.left, "right": operation.right})
