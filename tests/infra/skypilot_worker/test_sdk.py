"""The adapter against SkyPilot's own client, where it is installed; nothing is launched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from infra.skypilot_worker.port import ClusterLost, InfrastructureError, Job, JobState, LaunchFailed, Unreachable
from infra.skypilot_worker.sdk import Lines, SkySdk, one_line

sky = pytest.importorskip("sky", reason="SkyPilot is not installed: pip install 'sprawl-rl[sky]'")
exceptions = pytest.importorskip("sky.exceptions")


def test_job_states_are_skypilot_s() -> None:
    from sky.skylet.job_lib import JobStatus

    assert {state.value for state in JobState} == {state.value for state in JobStatus}
    assert {state.value for state in JobState if state.ended} == {s.value for s in JobStatus if s.is_terminal()}


def test_skypilot_s_own_checks_of_a_task() -> None:
    SkySdk().check({"name": "a", "run": "true", "num_nodes": 2, "envs": {"A": "b"}, "secrets": {"T": "t"}})
    for wrong, words in [
        ({"run": "true", "nodes": 2}, "nodes"),
        ({"run": "true", "resources": {"acelerators": "H100"}}, "acelerators"),
        ({"run": "true", "envs": {"BOARD": None}}, "BOARD"),
    ]:
        with pytest.raises(InfrastructureError, match=words):
            SkySdk().check(wrong)


def answering(monkeypatch: pytest.MonkeyPatch, answer: Any, clusters: Any = ()) -> None:
    """Let every request be answered so: `answer` to the question, `clusters` to the one after the cluster's state."""

    def get(request: Any) -> Any:
        result = clusters if request == "status" else answer
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(sky, "queue", lambda *args, **kwargs: "queue")
    monkeypatch.setattr(sky, "status", lambda *args, **kwargs: "status")
    monkeypatch.setattr(sky, "down", lambda *args, **kwargs: "down")
    monkeypatch.setattr(sky, "get", get)


def test_the_newest_job_of_a_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from sky.skylet.job_lib import JobStatus

    def record(number: int, name: str, status: JobStatus) -> dict[str, Any]:
        return {"job_id": number, "job_name": name, "status": status}

    answering(monkeypatch, [record(1, "a", JobStatus.FAILED), record(3, "b", JobStatus.RUNNING),
                            record(2, "a", JobStatus.RUNNING)])  # fmt: skip
    assert SkySdk().job("c", "a") == Job(2, "a", JobState.RUNNING)
    assert SkySdk().job("c", "x") is None


@pytest.mark.parametrize(
    ("answer", "clusters", "expected"),
    [
        (exceptions.ClusterDoesNotExist("c does not exist"), [], ClusterLost),
        (exceptions.ApiServerConnectionError("http://x"), [], Unreachable),
        (RuntimeError("ssh: connection refused"), [], ClusterLost),
        (RuntimeError("ssh"), [{"status": sky.ClusterStatus.INIT}], ClusterLost),
        (RuntimeError("ssh"), [{"status": sky.ClusterStatus.UP}], Unreachable),
        (RuntimeError("ssh"), RuntimeError("no network"), Unreachable),
    ],
)
def test_a_lost_cluster_is_told_from_a_silent_one(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, clusters: Any, expected: type[Exception]
) -> None:
    answering(monkeypatch, answer, clusters)
    for ask in (lambda: SkySdk().job("c", "a"), lambda: SkySdk().down("c")):
        with pytest.raises(expected):
            ask()


def test_a_launch_says_why_it_failed_and_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    seen = SimpleNamespace()

    def launch(task: Any, **kwargs: Any) -> str:
        seen.__dict__.update(kwargs, task=task)
        return "request"

    def stream(request: str, output_stream: Any) -> None:
        output_stream.write("\x1b[1mConsidered\x1b[0m resources\nLaunching")
        raise exceptions.ResourcesUnavailableError("no quota\nanywhere")

    monkeypatch.setattr(sky, "launch", launch)
    monkeypatch.setattr(sky, "stream_and_get", stream)
    with pytest.raises(LaunchFailed, match="no quota anywhere"):
        SkySdk().launch({"name": "j", "run": "true"}, "c", autostop_minutes=30, retry_until_up=True, say=said.append)
    assert said == ["Considered resources", "Launching"]
    assert (seen.cluster_name, seen.idle_minutes_to_autostop, seen.down, seen.retry_until_up) == ("c", 30, True, True)
    assert seen.task.name == "j"


def test_lines() -> None:
    got: list[str] = []
    lines = Lines(got.append)
    for piece in ("one\ntw", "o\n\n  \n", "10%\r50%\r100%\n", "\x1b[2mdim\x1b[0m", " end"):
        assert lines.write(piece) == len(piece)
    lines.end()
    assert got == ["one", "two", "100%", "dim end"]


def test_an_error_is_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 1000))) == 500
