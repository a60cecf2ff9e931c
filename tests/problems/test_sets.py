"""Problem sets: deterministic, never train on held-out problems, exact and unbreakable verifiers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sprawl.errors import ConfigError
from sprawl.problems import ProblemSet, load_problem_set, response_text

SETS: list[tuple[str, dict[str, Any]]] = [
    ("addition", {}),
    ("addition", {"digits": 1, "heldout_share": 0.5}),
    ("arithmetic", {}),
    ("arithmetic", {"digits": 2, "operators": "+-*", "shots": 3}),
]


@pytest.fixture(params=SETS, ids=str)
def problem_set(request: pytest.FixtureRequest) -> ProblemSet:
    name, params = request.param
    return load_problem_set(name, 7, params)


def core(prompt: str) -> str:
    """The question without its shots."""
    return prompt.rpartition("\n\n")[2]


def test_training_never_sees_a_heldout_problem_nor_its_mirror(problem_set: ProblemSet) -> None:
    heldout = problem_set.heldout(10**6)
    banned = {(p.meta["left"], p.meta.get("op", "+"), p.meta["right"]) for p in heldout}
    banned |= {(right, op, left) for left, op, right in banned if op in "+*"}
    for index in range(3000):
        meta = problem_set.train(index).meta
        assert (meta["left"], meta.get("op", "+"), meta["right"]) not in banned


def test_shots_are_training_problems_other_than_the_question() -> None:
    problem_set = load_problem_set("arithmetic", 0, {"shots": 5})
    heldout = {core(p.prompt) for p in problem_set.heldout(1000)}
    for problem in [*problem_set.heldout(30), *(problem_set.train(i) for i in range(200))]:
        *shots, question = problem.prompt.split("\n\n")
        asked = [shot.rpartition(" ")[0] for shot in shots]
        assert len(set(asked)) == 5
        assert question not in asked
        assert not heldout & set(asked)


def test_two_shots_of_one_problem_agree_and_gold_answers_are_paid(problem_set: ProblemSet) -> None:
    for problem in [*problem_set.heldout(20), *(problem_set.train(i) for i in range(20))]:
        assert problem_set.score(problem, problem.answer) == 1.0
    assert problem_set.train(5) == problem_set.train(5)


def test_draws_depend_on_seed_and_index_but_the_split_does_not_depend_on_the_seed() -> None:
    one, other = load_problem_set("addition", 1, {}), load_problem_set("addition", 2, {})
    assert [one.train(i).prompt for i in range(20)] != [other.train(i).prompt for i in range(20)]
    assert one.heldout(50) == other.heldout(50)


def test_heldout_is_distinct_nested_and_near_its_share() -> None:
    problem_set = load_problem_set("addition", 0, {"heldout_share": 0.25})
    everything = problem_set.heldout(10**6)
    assert len({p.prompt for p in everything}) == len(everything)
    assert 0.23 < len(everything) / 10**4 < 0.27
    assert problem_set.heldout(10) == everything[:10]
    assert len(load_problem_set("arithmetic", 0, {}).heldout(1000)) == 23  # of 100, a quarter by hash


def test_training_covers_every_other_problem_evenly() -> None:
    problem_set = load_problem_set("arithmetic", 0, {})
    drawn = [problem_set.train(i).prompt for i in range(7700)]
    assert len(set(drawn)) == 77
    assert max(drawn.count(prompt) for prompt in set(drawn)) < 160  # expected 100, sd 10


def test_the_same_problems_in_another_process_with_another_hash_seed() -> None:
    script = "from sprawl.problems import load_problem_set as l; s = l('addition', 3, {})\n"
    script += "print([s.train(i).prompt for i in range(5)], [p.prompt for p in s.heldout(5)])"
    runs = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_the_split_that_the_shipped_base_model_was_warmed_up_on_is_frozen() -> None:
    heldout = {p.prompt for p in load_problem_set("addition", 0, {}).heldout(10**6)}
    assert {"56+29=", "14+12=", "41+27="} <= heldout
    assert not {"57+44=", "78+81=", "75+70="} & heldout


def test_addition_pays_only_the_exact_format() -> None:
    problem_set = load_problem_set("addition", 0, {})
    problem = next(p for p in problem_set.heldout(10**6) if p.prompt == "56+29=")
    assert problem.answer == "085"
    for response in ("85", "0085", "580", "085 ", " 085", "085\n", "085=", "", "０８５"):
        assert problem_set.score(problem, response) == 0.0
    assert problem_set.score(problem, "085") == 1.0


@pytest.mark.parametrize(
    ("response", "paid"),
    [
        (" 8", 1.0),
        ("8\nQuestion: What is 9 + 9?", 1.0),
        (" 8 \n", 1.0),
        ("8.", 0.0),
        ("08", 0.0),
        ("+8", 0.0),
        ("\n8", 0.0),
        ("7 + 1 = 8", 0.0),
        ("8 8", 0.0),
        ("٨", 0.0),
        ("\t8", 0.0),
        ("", 0.0),
    ],
)
def test_arithmetic_pays_the_number_alone_on_the_first_line(response: str, paid: float) -> None:
    problem_set = load_problem_set("arithmetic", 0, {})
    problem = next(p for p in problem_set.heldout(10**6) if p.prompt == "Question: What is 7 + 1?\nAnswer:")
    assert problem_set.score(problem, response) == paid


def test_negative_results_and_products() -> None:
    problem_set = load_problem_set("arithmetic", 0, {"operators": "-*"})
    problems = [problem_set.train(i) for i in range(300)]
    golds = {p.prompt: p.answer for p in problems}
    negative = next(p for p in problems if p.meta["op"] == "-" and p.meta["left"] < p.meta["right"])
    assert negative.answer == str(negative.meta["left"] - negative.meta["right"])
    assert problem_set.score(negative, f" {negative.answer}\n") == 1.0
    assert all(golds[p.prompt] == str(p.meta["left"] * p.meta["right"]) for p in problems if p.meta["op"] == "*")


@given(response=st.text())
def test_scores_stay_in_range_whatever_the_response(response: str) -> None:
    for name, params in SETS:
        problem_set = load_problem_set(name, 0, params)
        problem = problem_set.train(0)
        score = problem_set.score(problem, response)
        assert score in (0.0, 1.0)
        assert score == 0.0 or problem.answer in response


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("additon", {}, "did you mean 'addition'.*known: addition, arithmetic"),
        ("addition", {"digit": 2}, "unknown key 'digit', did you mean 'digits'"),
        ("addition", {"digits": 0}, "'digits'"),
        ("addition", {"heldout_share": 0.9}, "'heldout_share'"),
        ("arithmetic", {"operators": "+/"}, "unknown operator '/'"),
        ("arithmetic", {"operators": "++"}, "twice"),
        ("arithmetic", {"template": "{left}"}, "{op} is missing"),
        ("arithmetic", {"template": "{left} {op} {right} {x}"}, "not a template"),
        ("arithmetic", {"heldout_share": 1e-9}, "no problem is held out"),
    ],
)
def test_wrong_names_and_params_are_refused_by_name(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_problem_set(name, 0, params)


class Letters:
    """Token i is the i-th letter; z ends a text."""

    eos_ids = (25,)

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


@pytest.mark.parametrize(("ids", "text"), [([0, 1, 25], "ab"), ([0, 25, 1], "a"), ([25], ""), ([0, 1], "ab"), ([], "")])
def test_a_response_ends_before_its_first_eos(ids: list[int], text: str) -> None:
    assert response_text(Letters(), ids) == text
