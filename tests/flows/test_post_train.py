"""The post-train flow: order of the phases, exactly one training of a step, interruption, failure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

from flows import flow_runs, server, terminal
from flows import post_train as module
from flows.post_train import ATTACHED, Attached, post_train
from infra.limits import FUTILE_ATTEMPTS
from infra.stack import Stack
from sprawl.board.records import StepRecord
from sprawl.config import parse_config
from sprawl.errors import BoardError, Diverged, FencedError, OvertakenError, SprawlError
from sprawl.run.options import RunOptions
from tests.flows.conftest import FakeSession, Recorder, task_run_names

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


def fail_with(error: BaseException):
    def fail() -> None:
        raise error

    return fail


@pytest.fixture
def attached(session: FakeSession, progress: Recorder):
    token = ATTACHED.set(Attached(session, progress))  # type: ignore[arg-type]
    yield ATTACHED.get()
    ATTACHED.reset(token)


def test_phases_run_in_order_and_the_run_is_evaluated_at_its_end(
    attached: Attached, session: FakeSession, progress: Recorder
) -> None:
    result = post_train()
    steps = [(phase, step) for step in (1, 2, 3) for phase in ("collect", "train", "publish")]
    assert session.calls == [("prepare", 0), *steps, ("evaluate", 3), ("finish", 3)]
    assert result["steps"] == 3
    assert (progress.steps, progress.evaluations, len(progress.finished)) == ([1, 2, 3], [3], 1)
    assert session.closed == 1


def test_the_flow_run_is_named_after_its_run_and_a_step_is_two_task_runs(
    attached: Attached, session: FakeSession
) -> None:
    post_train()
    server.flush()
    expected = {f"{task}-{step}" for task in ("train-step", "publish-version") for step in (1, 2, 3)}
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(UUID(attached.flow_run_id)).name == session.run_id
    names = {name for name in task_run_names(attached.flow_run_id, 10) if not name.startswith("report-")}
    assert names == expected | {"evaluate-version-3", "write-page"}


def test_prefect_keeps_nothing_of_a_step(
    attached: Attached, session: FakeSession, progress: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    tell = progress.step

    def watched(record: StepRecord) -> None:
        context = FlowRunContext.get()
        assert context is not None
        kept.append(len(context.run_results))
        tell(record)

    monkeypatch.setattr(progress, "step", watched)
    post_train()
    assert kept == [0, 0, 0]


def test_a_resumed_run_begins_after_its_head(attached: Attached, session: FakeSession, progress: Recorder) -> None:
    session.head_step = 2
    post_train()
    assert [call for call in session.calls if call[0] == "train"] == [("train", 3)]
    assert progress.steps == [3]


def test_a_retried_collect_does_not_train_twice(
    attached: Attached, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.train_step, "retry_delay_seconds", 0)
    session.faults["collect", 2] = [fail_with(ConnectionError("island lost"))]
    session.faults["publish", 3] = [fail_with(ConnectionError("board away"))]
    monkeypatch.setattr(module.publish_version, "retry_delay_seconds", 0)
    post_train()
    assert session.calls.count(("collect", 2)) == 2
    assert session.calls.count(("publish", 3)) == 2
    assert [session.calls.count(("train", step)) for step in (1, 2, 3)] == [1, 1, 1]


def test_a_failed_training_step_is_not_retried(attached: Attached, session: FakeSession) -> None:
    session.faults["train", 2] = [fail_with(RuntimeError("bug"))]
    with pytest.raises(RuntimeError, match="bug"):
        post_train()
    assert session.calls.count(("train", 2)) == 1
    assert session.closed == 1


def test_a_fenced_writer_does_not_try_again(attached: Attached, session: FakeSession) -> None:
    session.faults["collect", 2] = [fail_with(FencedError("epoch 2 took over"))]
    with pytest.raises(FencedError):
        post_train()
    assert session.calls.count(("collect", 2)) == 1
    assert session.closed == 1


def test_a_report_that_cannot_be_drawn_does_not_fail_the_run(
    attached: Attached, session: FakeSession, progress: Recorder
) -> None:
    assert post_train()["steps"] == 3  # the fake has no store to report from
    assert progress.finished[0].path is None
    assert any("no report page" in note for note in progress.notes)


# -- as a worker runs it


@dataclass
class Server:
    """What the flow told the server, and what the server answers."""

    claimed: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    rivals: list[Any] = field(default_factory=list)
    successors: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    refuses: bool = False
    id: str = "0d0e0f00-0000-4000-8000-000000000000"
    retried: bool = False

    def claim(self, run_id: str, parameters: dict[str, Any] | None = None) -> None:
        self.claimed.append(parameters or {})

    def rename(self, name: str) -> None:
        self.names.append(name)

    def rival(self, run_id: str) -> Any:
        return self.rivals[0] if self.rivals else None

    def successor(self, run_id: str, after_step: int, parameters: dict[str, Any]) -> str:
        if self.refuses:
            raise ConnectionError("no server")
        self.successors.append((run_id, after_step, parameters))
        return "http://ui/next"


@pytest.fixture
def told(session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> Server:
    told = Server()
    options = RunOptions(session.config, "run.yaml", "/board", run_id=session.run_id)
    monkeypatch.setattr(module, "ThisFlowRun", lambda: told)
    monkeypatch.setattr(module, "_options", lambda *arguments: options)
    monkeypatch.setattr(module, "open_session", lambda options: session)
    monkeypatch.setattr(module, "write_chain", lambda *arguments: True)
    return told


def test_a_flow_run_names_its_run_before_anything_of_it_exists(told: Server, session: FakeSession) -> None:
    assert post_train(overrides=["steps=3"])["steps"] == 3  # type: ignore[index]
    assert told.claimed[0] | {"segment": 0} == {
        "config": "configs/tiny.yaml",
        "overrides": ["steps=3"],
        "fleet": "local",
        "segment": 0,
        "attempt": 0,
        "board": "/board",
        "run_id": "tiny-1",
        "resume": None,
    }
    assert told.names == ["tiny-1"]
    assert [event.kind for event in session.ledger.written] == ["attempt"]


def test_of_two_flow_runs_of_one_run_the_second_is_cancelled(told: Server, session: FakeSession) -> None:
    told.rivals = [SimpleNamespace(id=UUID(told.id), name="tiny-1")]
    state = post_train(return_state=True)
    assert state.is_cancelled()
    assert "tiny-1 is being trained by flow run tiny-1" in str(state.message)
    assert session.calls == []


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (SprawlError("trainer process 3 was killed"), "CRASHED"),
        (OvertakenError("version 2 was committed by an earlier writer"), "CRASHED"),
        (RuntimeError("CUDA error"), "CRASHED"),
        (FencedError("epoch 2 took over"), "FAILED"),
        (Diverged("3 steps in a row"), "FAILED"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_only_what_a_new_start_may_cure_is_a_crash(
    told: Server, session: FakeSession, error: Exception, state: str
) -> None:
    session.faults["train", 2] = [fail_with(error)]
    assert post_train(return_state=True).type.value == state
    assert session.closed == 1


def test_what_is_wrong_from_the_start_fails_and_is_a_crash_only_later(
    told: Server, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(options: RunOptions) -> FakeSession:
        raise BoardError("no board at /board")

    monkeypatch.setattr(module, "open_session", away)
    assert post_train(return_state=True).is_failed()
    assert post_train(attempt=1, return_state=True).is_crashed()


def test_starts_that_lead_nowhere_wait_and_then_give_up(
    told: Server, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_for: list[int] = []
    monkeypatch.setattr(module, "pause_before", lambda tries: waited_for.append(tries) or 0.0)
    session.faults["prepare", 0] = [fail_with(SprawlError("no island became ready")) for _ in range(20)]
    ends = [post_train(attempt=attempt, return_state=True).type.value for attempt in range(FUTILE_ATTEMPTS + 2)]
    assert ends == ["CRASHED"] * (FUTILE_ATTEMPTS + 1) + ["FAILED"]
    assert waited_for == [2, 3, 4, 5, 6]
    session.reader.at = 2  # somebody else made a step: the row is over
    assert post_train(attempt=FUTILE_ATTEMPTS + 2, return_state=True).type.value == "CRASHED"
    state = post_train(attempt=FUTILE_ATTEMPTS + 3, return_state=True)
    assert state.type.value == "CRASHED"


def test_a_long_run_is_a_chain_of_flow_runs(told: Server, session: FakeSession) -> None:
    first = post_train(segment=2)
    assert first == {"run_id": "tiny-1", "steps": 2, "next": "http://ui/next"}
    assert told.names == ["tiny-1 1-2"]
    following = {"config": "configs/tiny.yaml", "fleet": "local", "segment": 2, "resume": "tiny-1", "board": "/nowhere"}
    assert told.successors == [("tiny-1", 2, following)]
    assert ("finish", 2) not in session.calls
    assert post_train(segment=2)["steps"] == 3  # type: ignore[index]
    assert told.names == ["tiny-1 1-2", "tiny-1 3-3"]
    assert [call for call in session.calls if call[0] == "train"] == [("train", 1), ("train", 2), ("train", 3)]
    assert len(told.successors) == 1
    assert session.closed == 2


def test_without_a_successor_a_flow_run_goes_on_itself(told: Server, session: FakeSession) -> None:
    told.refuses = True
    assert post_train(segment=1)["steps"] == 3  # type: ignore[index]
    assert [call for call in session.calls if call[0] == "train"] == [("train", 1), ("train", 2), ("train", 3)]


def test_the_server_keeps_what_a_flow_run_says_about_itself(
    told: Server, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client: tag, parameters and name; who is the rival; the chain as the UI shows it."""
    monkeypatch.setattr(module, "ThisFlowRun", flow_runs.ThisFlowRun)
    seen: list[Any] = []

    def look() -> None:
        this = flow_runs.ThisFlowRun()
        seen.append((this.id, this.rival(session.run_id)))
        with pytest.raises(ValueError, match="no deployment"):
            this.successor(session.run_id, 1, {})

    session.faults["train", 1] = [look]
    session.run_id = f"tiny-{uuid4()}"
    monkeypatch.setattr(
        module, "_options", lambda *arguments: RunOptions(session.config, "c", "/board", run_id=session.run_id)
    )
    post_train(segment=2)  # has no deployment: it goes on itself, to the end
    ((flow_run_id, rival),) = seen
    assert rival is None
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(flow_run_id))
        chain = flow_runs.read_chain(client, session.run_id)
    assert run.tags == [f"run:{session.run_id}"]
    assert run.parameters["run_id"] == session.run_id
    assert run.parameters["board"] == "/board"
    assert run.name == f"{session.run_id} 1-2"
    assert [(link.name, link.attempt) for link in chain] == [(run.name, 0)]
    assert chain[0].url.endswith(flow_run_id)


# -- in a terminal


@pytest.fixture
def options(session: FakeSession, progress: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path) -> RunOptions:
    monkeypatch.setattr(terminal, "open_session", lambda options: session)
    monkeypatch.setattr("sprawl.run.terminal.Progress", lambda: progress)
    source = tmp_path / "run.yaml"
    source.write_text("{name: tiny, steps: 5, policy: {base: x}}")
    return RunOptions(session.config, str(source), str(tmp_path / "runs"))


def flow_run_state(progress: Recorder) -> str:
    url = next(note for note in progress.notes if note.startswith("UI: "))
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(url.rsplit("/", 1)[1])).state
    assert state is not None
    return state.type.value


def test_a_finished_run_exits_with_0_and_shows_where_to_look(options: RunOptions, progress: Recorder) -> None:
    assert terminal.run_in_terminal(options, up=False) == 0
    assert sum(note.startswith("UI: http") for note in progress.notes) == 2
    assert flow_run_state(progress) == "COMPLETED"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_run_in_order_and_says_how_to_resume(
    options: RunOptions, session: FakeSession, progress: Recorder, number: signal.Signals
) -> None:
    session.faults["train", 2] = [lambda: signal.raise_signal(number)]
    before = signal.getsignal(signal.SIGTERM)
    assert terminal.run_in_terminal(options, up=False) == 130
    assert session.closed >= 1
    assert session.calls[-1] == ("train", 2)
    said = "\n".join(progress.notes)
    assert f"sprawl run {options.config_source} --resume tiny-1" in said
    assert f'make run CONFIG={options.config_source} ARGS="--resume tiny-1"' in said
    assert flow_run_state(progress) == "CANCELLED"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_failing_run_raises_its_own_error_after_saying_how_to_resume(
    options: RunOptions, session: FakeSession, progress: Recorder
) -> None:
    session.faults["train", 1] = [fail_with(SprawlError("no island became ready"))]
    with pytest.raises(SprawlError, match="no island became ready"):
        terminal.run_in_terminal(options, up=False)
    assert any("--resume tiny-1" in note for note in progress.notes)
    assert flow_run_state(progress) == "FAILED"


def test_a_long_run_in_a_terminal_is_one_flow_run_a_segment(
    options: RunOptions, session: FakeSession, progress: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = terminal.flow_parameters(options, session.run_id)
    monkeypatch.setattr(terminal, "flow_parameters", lambda *arguments: {**parameters, "segment": 2})
    assert terminal.run_in_terminal(options, up=False) == 0
    assert session.calls.count(("prepare", 0)) == 1
    assert [call for call in session.calls if call[0] == "train"] == [("train", 1), ("train", 2), ("train", 3)]
    assert (progress.steps, session.closed) == ([1, 2, 3], 1)
    urls = {note for note in progress.notes if note.startswith("UI: http")}
    assert len(urls) == 2


def test_violations_make_the_exit_code_1(
    options: RunOptions, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = session.finish()
    monkeypatch.setattr(session, "finish", lambda: type(receipt)("tiny-1", 3, 4, ["version 2 differs"]))
    assert terminal.run_in_terminal(options, up=False) == 1


def test_a_stack_this_call_started_is_stopped_when_interrupted(
    options: RunOptions, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []
    monkeypatch.setattr(terminal, "_connect", lambda stack, up, progress: True)
    monkeypatch.setattr(Stack, "down", lambda self: stopped.append(self) or True)
    session.faults["collect", 1] = [fail_with(KeyboardInterrupt())]
    assert terminal.run_in_terminal(options, up=True) == 130
    assert len(stopped) == 1


def test_without_a_server_nothing_is_trained(
    options: RunOptions, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "reachable", lambda: False)
    monkeypatch.setattr(server, "bound_exit", lambda code: None)
    with pytest.raises(SprawlError, match=r"no Prefect server answers.*--up"):
        terminal.run_in_terminal(options, up=False)
    assert session.calls == []
    assert session.closed >= 1


# -- parameters


def test_the_parameters_shown_say_what_was_overridden(options: RunOptions) -> None:
    base = {"name": "tiny", "steps": 5, "policy": {"base": "x"}}
    changed = parse_config(
        base | {"steps": 9, "boundary": {"codec": "dense"}, "problems": {"params": {"digits": 1}}}, "test"
    )
    assert terminal.config_overrides(changed, options.config_source) == [
        "steps=9",
        'problems.params={"digits": 1}',
        'boundary.codec="dense"',
    ]
    parameters = terminal.flow_parameters(options, "tiny-1")
    assert parameters["overrides"] == ["steps=3"]
    assert parameters["run_id"] == "tiny-1"
