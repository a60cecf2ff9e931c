"""The post-train flow: order of the phases, exactly one training of a step, interruption, failure."""

from __future__ import annotations

import signal
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client

from flows import post_train as module
from flows import server, terminal
from flows.post_train import ATTACHED, Attached, post_train
from infra.stack import Stack
from sprawl.config import parse_config
from sprawl.errors import FencedError, SprawlError
from sprawl.run.options import RunOptions
from tests.flows.conftest import FakeSession, Recorder

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


def test_the_flow_run_is_named_after_its_run_and_has_one_task_run_a_phase(
    attached: Attached, session: FakeSession
) -> None:
    post_train()
    server.flush()
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(UUID(attached.flow_run_id)).name == session.run_id


def test_a_resumed_run_begins_after_its_head(attached: Attached, session: FakeSession, progress: Recorder) -> None:
    session.head_step = 2
    post_train()
    assert [call for call in session.calls if call[0] == "train"] == [("train", 3)]
    assert progress.steps == [3]


def test_a_retried_collect_does_not_train_twice(
    attached: Attached, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.collect_rollouts, "retry_delay_seconds", 0)
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
