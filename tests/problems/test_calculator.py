"""The calculator and its problem set: exact, deterministic, and not to be broken by anything a policy writes."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sprawl.errors import ConfigError
from sprawl.problems import Problem, ToolProblemSet, load_problem_set
from sprawl.problems.expression import MAX_LENGTH, evaluate

OPERATIONS = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-({text})"),
    ),
    max_leaves=12,
)


@given(OPERATIONS)
def test_values_are_those_of_arithmetic(text: str) -> None:
    if len(text) <= MAX_LENGTH:
        assert evaluate(text) == eval(text)


@given(st.text(alphabet="0123456789+-*()= x\n", max_size=MAX_LENGTH + 5))
def test_anything_else_has_no_value_and_raises_nothing(text: str) -> None:
    value = evaluate(text)
    if "=" in text or "x" in text or not text.strip() or len(text) > MAX_LENGTH:
        assert value is None


@pytest.mark.parametrize(
    "text", ["1+", "+1", "(1", "1)", "()", "1 2", "2**3", "(" * 50 + "1" + ")" * 50, "-" * 60 + "1"]
)
def test_what_nobody_means_has_no_value(text: str) -> None:
    assert evaluate(text) is None


def calculator(**params: Any) -> ToolProblemSet:
    found = load_problem_set("calculator", 7, params)
    assert isinstance(found, ToolProblemSet)
    return found


def test_only_sets_with_tools_are_played_in_turns() -> None:
    assert not isinstance(load_problem_set("addition", 7, {}), ToolProblemSet)


def test_problems_are_fixed_and_training_sees_no_heldout_one_in_any_order() -> None:
    problems = calculator(digits=1)
    assert problems.train(5) == calculator(digits=1).train(5)
    heldout = problems.heldout(200)
    assert len({p.meta["expression"] for p in heldout}) == len(heldout) > 100
    assert [p.index for p in heldout] == list(range(len(heldout)))
    assert heldout == load_problem_set("calculator", 8, {"digits": 1}).heldout(200)
    banned = {"+".join(order) for p in heldout for order in permutations(p.meta["expression"].split("+"))}
    for index in range(2000):
        assert problems.train(index).meta["expression"] not in banned
    few = calculator(digits=1, terms=2, heldout_share=0.1).heldout(10**6)
    assert 3 <= len(few) <= 20  # all of them, and an end


def test_turns() -> None:
    problems = calculator(terms=3)
    problem = Problem(0, "", "51", {})
    assert problems.reply(problem, [" I ask <<12+34="]) == "46>>"
    assert problems.reply(problem, [" <<12+34=", "<<46+5="]) == "51>>"
    assert problems.reply(problem, ["<<12+="]) == "error>>"
    assert problems.reply(problem, ["12+34="]) is None  # no call
    assert problems.reply(problem, ["<<12+34"]) is None
    assert problems.reply(problem, ["51"]) is None
    assert problems.reply(problem, [""]) is None
    assert [problems.score(problem, text) for text in ("51", " 51 \nmore", "051", "<<12+34=", "")] == [1, 1, 0, 0, 0]
    bare = calculator(call_open="", result_close=" ")
    assert bare.reply(problem, ["12+34="]) == "46 "


@given(st.text(max_size=60))
def test_no_turn_breaks_tool_or_verifier(text: str) -> None:
    problems = calculator()
    problem = problems.train(0)
    problems.reply(problem, [text + "="])
    assert 0.0 <= problems.score(problem, text) <= 1.0


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"operators": "+/"}, "unknown operator '/'"),
        ({"template": "What?"}, "{expression} is missing"),
        ({"template": "{x} {expression}"}, "not a template"),
        ({"call_close": ""}, "call_close"),
        ({"turns": 3}, "unknown key 'turns'"),
    ],
)
def test_params_that_make_no_sense_are_named(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        calculator(**params)
    assert said in str(caught.value)
