"""Wrong parameters of every flow, as `prefect deployment run NAME --param ...` hands them over: an error that names the
field or the thing, and the fix, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import ParameterTypeError, SignatureMismatchError
from prefect.logging import disable_run_logger
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

from flows import post_train as post_train_module
from flows import promote as promote_module
from flows.anchor import anchor
from flows.compare import compare
from flows.evaluate import evaluate
from flows.fleet import fleet
from flows.post_train import post_train
from flows.promote import promote
from infra.deployments import DEPLOYMENTS, SKY_DEPLOYMENTS, Deployment, flow_of
from sprawl.board.ledger import Ledger
from sprawl.board.store import open_store
from sprawl.errors import SprawlError
from tests.report.plausible import make_run_record

FLOWS = (post_train, anchor, evaluate, compare, promote, fleet)
ROOT = Path(__file__).parents[2]


def test_no_flow_is_left_out() -> None:
    assert {flow_of(item).name for item in (*DEPLOYMENTS, *SKY_DEPLOYMENTS)} == {flow.name for flow in FLOWS}


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_an_unknown_key_is_named(flow: Any) -> None:
    with pytest.raises(SignatureMismatchError, match="'nonsense'"):
        flow.validate_parameters({"nonsense": 1})


@pytest.mark.parametrize("deployment", [*DEPLOYMENTS, *SKY_DEPLOYMENTS], ids=lambda d: f"{d.entrypoint}/{d.name}")
def test_what_deployments_start_with_is_right(deployment: Deployment) -> None:
    flow_of(deployment).validate_parameters(dict(deployment.parameters))


@pytest.mark.parametrize(
    ("flow", "parameters", "field"),
    [
        (post_train, {"segment": "many"}, "segment"),
        (post_train, {"segment": 0}, "segment"),
        (post_train, {"attempt": 1000}, "attempt"),
        (post_train, {"overrides": "steps=3"}, "overrides"),
        (post_train, {"config": 7}, "config"),
        (post_train, {"run_id": "../other"}, "run_id"),
        (post_train, {"run_id": ""}, "run_id"),
        (anchor, {"run_id": 7}, "run_id"),
        (evaluate, {"version": "newest"}, "version"),
        (evaluate, {"version": -1}, "version"),
        (evaluate, {"problems": 0}, "problems"),
        (evaluate, {"every": 0}, "every"),
        (compare, {"parallel": 0}, "parallel"),
        (compare, {"seeds": ["seven"]}, "seeds"),
        (compare, {"only": "prf"}, "only"),
        (compare, {"quick": "perhaps"}, "quick"),
        (promote, {"version": -1}, "version"),
        (promote, {"verify": "perhaps"}, "verify"),
        (fleet, {"settings": {"max_island": 3}}, "max_island"),
        (fleet, {"settings": {"max_islands": "many"}}, "max_islands"),
        (fleet, {"machines": None}, "machines"),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else str(value),
)
def test_a_wrong_value_is_refused_by_the_server_and_by_the_flow(flow: Any, parameters: dict, field: str) -> None:
    schema = parameter_schema(flow.fn).model_dump_for_openapi()
    with pytest.raises(ValidationError, match=field):
        validate(parameters, schema, raise_on_error=True)
    with pytest.raises(ParameterTypeError, match=field):
        flow.validate_parameters(parameters)


# -- what only the flow can know: files, runs, names


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a worker starts flow runs: configs, and a board with one run without versions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPRAWL_BOARD", raising=False)
    monkeypatch.setattr(promote_module, "read_flow_run_input", lambda key: None)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    Ledger(open_store("runs", create=True), "run-1").create_run(make_run_record("anchor.enabled=false", run_id="run-1"))
    return tmp_path


def start(**parameters: Any) -> Any:
    """The flow post-train up to the point where it knows what to do."""
    known = {
        "config": "configs/tiny.yaml",
        "resume": None,
        "board": None,
        "run_id": None,
        "overrides": [],
        "attempt": 0,
    }
    this: Any = SimpleNamespace(retried=False)
    return post_train_module._options(this, **{**known, "fleet": "local", **parameters})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: start(config="configs/none.yaml"), r"no run config at configs/none.yaml \(see configs/"),
        (lambda: start(overrides=["step=3"]), r"step\b.*steps"),
        (lambda: start(overrides=["steps=many"]), "steps"),
        (lambda: start(overrides=["steps"]), "steps.*="),
        (lambda: start(fleet="clouds"), r"no fleet named 'clouds' is installed \(installed: .*local.*none"),
        (lambda: start(resume="run-9"), r"no run 'run-9' on board .*runs there: run-1"),
        (lambda: start(resume="run-1", board="elsewhere"), "no board at .*elsewhere"),
        (lambda: anchor.fn("run-9"), r"no run 'run-9' on board .*runs there: run-1"),
        (lambda: anchor.fn("run-1"), "run-1 has anchor.enabled=false"),
        (lambda: evaluate.fn("run-9"), "no run 'run-9'"),
        (lambda: evaluate.fn("run-1"), r"run run-1 has no version at all \(it has none yet"),
        (lambda: evaluate.fn(board="elsewhere"), "no board at .*elsewhere"),
        (lambda: compare.fn(study="configs/none.yaml"), "configs/none.yaml"),
        (lambda: compare.fn(only=["nobody"]), "nobody"),
        (lambda: compare.fn(seeds=[99]), r"has no seed 99 \(its seeds are"),
        (lambda: promote.fn("run-9"), "no run 'run-9'"),
        (lambda: promote.fn("run-1"), "run-1"),
        (lambda: fleet.fn("run-9"), "no run 'run-9'"),
        (lambda: fleet.fn("run-1", machines="clouds"), "no fleet named 'clouds' is installed"),
    ],
)
def test_what_is_not_there_is_named_before_anything_is_done(call: Callable[[], Any], says: str, place: Path) -> None:
    before = sorted(path for path in place.rglob("*"))
    with disable_run_logger(), pytest.raises(SprawlError, match=f"(?s){says}") as caught:
        call()
    assert "\n" not in str(caught.value)
    assert sorted(path for path in place.rglob("*")) == before
