"""Arithmetic questions for a language model: `Question: What is 3 + 4?\\nAnswer:` wants `7` on its line."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from pydantic import Field, field_validator

from sprawl.config import Section
from sprawl.problems.base import Problem
from sprawl.problems.draw import Operation, Operations

KNOWN_OPERATORS = "+-*"


class ArithmeticParams(Section):
    digits: Annotated[int, Field(ge=1, le=6)] = Field(1, description="Operands are 0 .. 10**digits - 1.")
    operators: Annotated[str, Field(min_length=1)] = Field("+", description="Characters out of + - *.")
    template: str = Field("Question: What is {left} {op} {right}?\nAnswer:", description="Uses {left} {op} {right}.")
    shots: Annotated[int, Field(ge=0, le=16)] = Field(0, description="Solved training problems before the question.")
    heldout_share: Annotated[float, Field(gt=0, le=0.5)] = Field(0.25, description="Share never trained on.")

    @field_validator("operators")
    @classmethod
    def _known_operators(cls, value: str) -> str:
        if unknown := set(value) - set(KNOWN_OPERATORS):
            raise ValueError(f"unknown operator {min(unknown)!r}, known: {' '.join(KNOWN_OPERATORS)}")
        if len(set(value)) != len(value):
            raise ValueError(f"an operator appears twice in {value!r}")
        return value

    @field_validator("template")
    @classmethod
    def _usable_template(cls, value: str) -> str:
        try:
            filled = value.format(left="<left>", op="<op>", right="<right>")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"not a template of {{left}}, {{op}} and {{right}}: {error}") from None
        if missing := [part for part in ("left", "op", "right") if f"<{part}>" not in filled]:
            raise ValueError(f"{{{missing[0]}}} is missing from the template")
        return value


class Arithmetic:
    """The response's first line, stripped of blanks, has to be the number in plain decimal, nothing else."""

    name = "arithmetic"
    stop: tuple[str, ...] = ("\n",)

    def __init__(self, seed: int, params: ArithmeticParams) -> None:
        self._seed = seed
        self._params = params
        self._operations = Operations(self.name, params.digits, params.operators, params.heldout_share)

    def train(self, index: int) -> Problem:
        return self._problem(index, self._operations.draw(self._seed, index))

    def heldout(self, count: int) -> list[Problem]:
        chosen = islice(self._operations.heldout(), count)
        return [self._problem(index, operation) for index, operation in enumerate(chosen)]

    def score(self, problem: Problem, response: str) -> float:
        return float(response.partition("\n")[0].strip(" ") == problem.answer)

    def _problem(self, index: int, operation: Operation) -> Problem:
        solved = [f"{self._ask(shot)} {shot.result}\n\n" for shot in self._shots(operation)]
        meta = {"left": operation.left, "op": operation.op, "right": operation.right}
        return Problem(index, "".join(solved) + self._ask(operation), str(operation.result), meta)

    def _ask(self, operation: Operation) -> str:
        return self._params.template.format(left=operation.left, op=operation.op, right=operation.right)

    def _shots(self, operation: Operation) -> list[Operation]:
        """Distinct training problems other than this one, keyed by it: one problem always has one prompt."""
        key = f"{operation.left}{operation.op}{operation.right}"
        shots: list[Operation] = []
        attempt = 0
        while len(shots) < self._params.shots:
            shot = self._operations.draw("shot", key, attempt)
            attempt += 1
            if shot != operation and shot not in shots:
                shots.append(shot)
        return shots
