"""Sums with a calculator at hand: the policy may ask it, reads the result, and then has to say the answer.

A turn that ends in a call, `<<12+34=` in the default notation, is answered with the result, `46>>`, and the policy goes
on. Any other turn is the answer: its first line, stripped of blanks, has to be the number, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from sprawl.config import Section
from sprawl.problems.base import Problem
from sprawl.problems.draw import keyed_integer
from sprawl.problems.expression import evaluate

KNOWN_OPERATORS = "+-*"
TRIES = 1000  # draws that may fail in a row before the held-out problems count as all found


class CalculatorParams(Section):
    terms: Annotated[int, Field(ge=2, le=8)] = Field(3, description="Numbers in an expression.")
    digits: Annotated[int, Field(ge=1, le=6)] = Field(2, description="Operands are 0 .. 10**digits - 1.")
    operators: Annotated[str, Field(min_length=1)] = Field("+", description="Characters out of + - *.")
    template: str = Field(
        "Question: What is {expression}? Write <<a+b= to use the calculator.\nAnswer:", description="Uses {expression}."
    )
    call_open: str = Field("<<", description="Begins a call; empty: a whole turn that ends in call_close is one.")
    call_close: Annotated[str, Field(min_length=1)] = Field("=", description="Ends a call, and the turn.")
    result_close: str = Field(">>", description="Follows the result.")
    error: str = Field("error", description="Result of an expression that is none.")
    max_turns: Annotated[int, Field(ge=1, le=64)] = Field(4, description="Turns after which an episode ends.")
    heldout_share: Annotated[float, Field(gt=0, le=0.5)] = Field(0.2, description="Share never trained on.")

    @field_validator("operators")
    @classmethod
    def _known_operators(cls, value: str) -> str:
        if unknown := set(value) - set(KNOWN_OPERATORS):
            raise ValueError(f"unknown operator {min(unknown)!r}, known: {' '.join(KNOWN_OPERATORS)}")
        return value

    @model_validator(mode="after")
    def _usable_template(self) -> CalculatorParams:
        try:
            filled = self.template.format(expression="<expression>")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"template: not a template of {{expression}}: {error}") from None
        if "<expression>" not in filled:
            raise ValueError("template: {expression} is missing from it")
        return self


class Calculator:
    """See the module. Verifier and tool are exact and never raise, whatever the policy writes."""

    name = "calculator"

    def __init__(self, seed: int, params: CalculatorParams) -> None:
        self._seed = seed
        self._params = params

    @property
    def stop(self) -> tuple[str, ...]:
        return (self._params.call_close, "\n")

    @property
    def max_turns(self) -> int:
        return self._params.max_turns

    def train(self, index: int) -> Problem:
        expressions = (self._draw("train", self._seed, index, attempt) for attempt in count())
        return self._problem(index, next(e for e in expressions if not self._is_heldout(e)))

    def heldout(self, count: int) -> list[Problem]:
        return [self._problem(index, e) for index, e in enumerate(islice(self._heldout(), count))]

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        """The calculator's answer to the last turn, None when that was no call."""
        called = self._call(turns[-1])
        if called is None:
            return None
        result = evaluate(called)
        return (self._params.error if result is None else str(result)) + self._params.result_close

    def score(self, problem: Problem, response: str) -> float:
        return float(response.partition("\n")[0].strip(" ") == problem.answer)

    def _call(self, turn: str) -> str | None:
        """The expression of a turn that ends in a call."""
        if not turn.endswith(self._params.call_close):
            return None
        body = turn.removesuffix(self._params.call_close)
        if not self._params.call_open:
            return body
        _, opened, expression = body.rpartition(self._params.call_open)
        return expression if opened else None

    def _draw(self, *key: str | int) -> str:
        place = (self.name, *key, self._params.terms, self._params.digits, self._params.operators)
        parts: list[str] = []
        for term in range(self._params.terms):
            if term:
                parts.append(self._params.operators[keyed_integer(len(self._params.operators), *place, term, "op")])
            parts.append(str(keyed_integer(10**self._params.digits, *place, term)))
        return "".join(parts)

    def _is_heldout(self, expression: str) -> bool:
        # Sums of the same numbers in another order fall on the same side: one must not give the other away.
        key = "+".join(sorted(expression.split("+"))) if self._params.operators == "+" else expression
        return keyed_integer(2**64, self.name, "split", key) < self._params.heldout_share * 2**64

    def _heldout(self) -> Iterator[str]:
        """Distinct held-out expressions in a fixed order, until `TRIES` draws in a row bring no new one."""
        seen: set[str] = set()
        missed = 0
        for number in count():
            expression = self._draw("heldout", number)
            if expression in seen or not self._is_heldout(expression):
                missed += 1
                if missed >= TRIES:
                    return
                continue
            missed = 0
            seen.add(expression)
            yield expression

    def _problem(self, index: int, expression: str) -> Problem:
        result = evaluate(expression)
        assert result is not None
        prompt = self._params.template.format(expression=expression)
        return Problem(index, prompt, str(result), {"expression": expression})
