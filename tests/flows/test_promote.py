"""The gate: nothing is promoted without a person, and what they decided is what was shown to them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest
from click.testing import CliRunner
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.utilities.callables import parameter_schema

from flows.promote import promote
from infra.watch_commands import promote as promote_command
from sprawl.board.commit import CommitOptions
from sprawl.board.ledger import Ledger
from sprawl.board.publisher import Publisher
from sprawl.board.records import PromotionRecord
from sprawl.board.retention import gc, plan_gc
from sprawl.board.store import open_store
from tests.report.plausible import make_evaluation, make_run_record

RUN = "gate-0001"


@pytest.fixture
def board(tmp_path: Path) -> SimpleNamespace:
    """A run with three published versions; `publish` adds the next one."""
    import torch

    store = open_store(str(tmp_path), create=True)
    ledger = Ledger(store, RUN)
    ledger.create_run(make_run_record(run_id=RUN))
    publisher = Publisher(store, RUN, CommitOptions(keyframe_every=2, dtype="bfloat16"))

    def publish(version: int) -> None:
        publisher.publish(version, version, {"w": torch.full((8,), float(version), dtype=torch.bfloat16)})

    for version in range(3):
        publish(version)
    ledger.write_evaluation(make_evaluation(2, 0.875))
    return SimpleNamespace(url=str(tmp_path), store=store, ledger=ledger, publish=publish)


@pytest.fixture
def gate(board: SimpleNamespace, prefect_server: None):
    """Starts a flow run of the deployment in this process, as a worker would, and resumes it."""
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(
            flow_id=client.create_flow_from_name("promote"),
            name="local",
            parameter_openapi_schema=parameter_schema(promote.fn).model_dump_for_openapi(),
        )
        yield Gate(client, deployment, board.url)


class Gate:
    def __init__(self, client: SyncPrefectClient, deployment: UUID, board: str) -> None:
        self.client, self._deployment, self._board = client, deployment, board

    def ask(self, **parameters: object) -> UUID:
        given = {"board": self._board, **parameters}
        return self.client.create_flow_run_from_deployment(self._deployment, parameters=given).id

    def work(self, flow_run: UUID) -> str:
        """What a worker does with it; the state it is in afterwards."""
        found = self.client.read_flow_run(flow_run)
        with contextlib.suppress(Pause):  # how a flow that suspends leaves its process
            run_flow(promote, flow_run=found, parameters=found.parameters, return_type="state")
        return self.client.read_flow_run(flow_run).state.name

    def answer(self, flow_run: UUID, **form: object) -> None:
        result = self.client.resume_flow_run(flow_run, run_input=form)
        assert result.status.value == "ACCEPT", result.details


@pytest.mark.slow
def test_a_version_is_promoted_as_it_was_when_the_question_was_asked(board: SimpleNamespace, gate: Gate) -> None:
    asked = gate.ask(run_id="latest")
    assert gate.work(asked) == "Suspended"
    assert board.ledger.promotions() == []
    board.publish(3)  # the run goes on while people think
    other = Ledger(board.store, "gate-0002")
    other.create_run(make_run_record(run_id="gate-0002").model_copy(update={"created_at": 2e9}))
    gate.answer(asked, approve=True, by="Ada", reason="best on held-out problems")
    assert gate.work(asked) == "Completed"
    (record,) = board.ledger.promotions()
    assert (record.version, record.approved, record.by, record.accuracy) == (2, True, "Ada", 0.875)
    assert record.flow_run == str(asked)
    assert other.promotions() == []

    again = gate.ask(run_id=RUN, version=2)
    assert gate.work(again) == "Failed"
    assert "was promoted by Ada" in gate.client.read_flow_run(again).state.message


@pytest.mark.slow
def test_the_form_wants_a_name_and_a_rejection_is_on_record_too(board: SimpleNamespace, gate: Gate) -> None:
    asked = gate.ask(run_id=RUN, version=1)
    assert gate.work(asked) == "Suspended"
    refused = gate.client.resume_flow_run(asked, run_input={"approve": True, "by": ""})
    assert refused.status.value == "REJECT"
    gate.answer(asked, by="Grace")  # approve left off
    assert gate.work(asked) == "Completed"
    assert [(r.version, r.approved) for r in board.ledger.promotions()] == [(1, False)]
    listed = CliRunner().invoke(promote_command, [RUN, "--board", board.url, "--list"])
    assert "1  rejected  by Grace" in listed.output


@pytest.mark.slow
def test_a_version_that_does_not_rebuild_is_not_even_asked_about(board: SimpleNamespace, gate: Gate) -> None:
    for key in board.store.list(f"{RUN}/blobs/2/"):
        Path(board.url, key).write_bytes(b"damaged")
    asked = gate.ask(run_id=RUN, version=2)
    assert gate.work(asked) == "Failed"
    assert board.ledger.promotions() == []


def decision(version: int, approved: bool = True) -> PromotionRecord:
    return PromotionRecord(version=version, approved=approved, root_digest="ab", by="Ada", at=1.0)


def test_a_decision_stands(board: SimpleNamespace) -> None:
    assert board.ledger.write_promotion(decision(1))
    assert not board.ledger.write_promotion(decision(1, approved=False))
    assert board.ledger.promotion(1).approved


def test_promoted_versions_survive_the_garbage_collection(board: SimpleNamespace) -> None:
    for version in range(3, 9):
        board.publish(version)
    board.ledger.write_promotion(decision(5))
    board.ledger.write_promotion(decision(1, approved=False))  # rejected: no reason to keep it
    report = gc(board.store, RUN, keep_versions=1)
    assert report.plan.keep_from == 4
    assert report.plan.reason == "version 5 was promoted, which needs keyframe 4"
    assert plan_gc([4, 5], [4], [], 1, [2]).keep_from == 4  # one that is gone already holds nothing back
