"""The worker against a real Prefect server and a SkyPilot in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import InfrastructureNotAvailable, InfrastructureNotFound
from prefect.logging.handlers import APILogHandler
from prefect.states import Cancelling, Completed, Pending, Running, State

from infra.skypilot_worker import SkyJobConfiguration, SkyWorker
from infra.skypilot_worker.port import InfrastructureError, JobPlace, JobState
from infra.skypilot_worker.task import COMMAND
from tests.conftest import PATIENCE
from tests.infra.skypilot_worker.fake import FakeSky

pytestmark = pytest.mark.usefixtures("prefect_server", "no_real_sky")
POOL = "sky-test"
WAIT_S = 60.0 * PATIENCE


@pytest.fixture
def no_real_sky(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is not given a fake must not start SkyPilot's API server on this machine."""
    monkeypatch.setattr(SkyWorker, "sky", None)


@flow(name="nothing")
def nothing() -> None:
    """Never run: its flow runs are moved by the tests."""


@dataclass
class Scene:
    """One flow run that the worker has taken, as `PENDING`."""

    worker: SkyWorker
    client: PrefectClient
    flow_run: FlowRun
    configuration: SkyJobConfiguration
    sky: FakeSky
    place: JobPlace | None = None
    stopped: bool = False  # set by a story: the worker is stopped when the story ends

    async def until(self, event: threading.Event) -> None:
        assert await asyncio.to_thread(event.wait, WAIT_S)

    async def set(self, state: State) -> None:
        await self.client.set_flow_run_state(self.flow_run.id, state, force=True)

    async def state(self) -> State:
        state = (await self.client.read_flow_run(self.flow_run.id)).state
        assert state is not None
        return state

    @property
    def cluster(self) -> str:
        assert self.place is not None, "the infrastructure id was not reported"
        return self.place.cluster


Story = Callable[[Scene], Awaitable[None]]


def play(story: Story, sky: FakeSky, **values: Any) -> tuple[Scene, int]:
    """Run one flow run through the worker while `story` happens; the scene afterwards, and the status code."""

    async def run() -> tuple[Scene, int]:
        async with get_client() as client, SkyWorker(work_pool_name=POOL) as worker:
            worker.sky = lambda: sky
            await worker.sync_with_backend()
            flow_run = await client.create_flow_run(nothing, state=Pending(), name="Lively Otter")
            configuration = await SkyJobConfiguration.from_template_and_values(
                worker.work_pool.base_job_template, {"poll_s": 0.05, **values}, client=client
            )
            configuration.prepare_for_flow_run(flow_run)
            scene = Scene(worker, client, flow_run, configuration, sky)
            code = 0

            async def work(*, task_status: anyio.abc.TaskStatus[str]) -> None:
                nonlocal code
                result = await worker.run(flow_run, configuration, task_status)
                assert result.identifier == str(scene.place)
                code = result.status_code

            with anyio.fail_after(WAIT_S):
                async with anyio.create_task_group() as group:
                    scene.place = JobPlace.parse(await group.start(work))
                    await story(scene)
                    if scene.stopped:
                        group.cancel_scope.cancel()
            return scene, code

    return asyncio.run(run())


def final(scene: Scene) -> State:
    async def read() -> State:
        async with get_client() as client:
            state = (await client.read_flow_run(scene.flow_run.id)).state
            assert state is not None
            return state

    return asyncio.run(read())


async def completes(scene: Scene) -> None:
    await scene.until(scene.sky.running)
    await scene.set(Running())
    await scene.set(Completed())
    scene.sky.end(scene.cluster, JobState.SUCCEEDED)


def test_a_flow_run_that_completes() -> None:
    sky = FakeSky()
    scene, code = play(completes, sky, accelerators="L4", infra="gcp")
    assert (code, final(scene).type.value) == (0, "COMPLETED")
    assert sky.asked("launch") == sky.asked("down") == [scene.cluster]
    assert sky.clusters == {}
    assert sky.autostops == [30]
    (task,) = sky.tasks
    assert task["resources"] == {"accelerators": "L4", "infra": "gcp"}
    assert task["envs"]["PREFECT__FLOW_RUN_ID"] == str(scene.flow_run.id)
    assert task["envs"][COMMAND] == "prefect flow-run execute"
    assert scene.place is not None
    assert scene.place.job == task["name"] == f"lively-otter-{scene.flow_run.id.hex[:8]}"


def test_a_task_that_skypilot_refuses_is_never_launched() -> None:
    sky = FakeSky(refusal="accelerators: unknown")

    async def nothing_happens(scene: Scene) -> None:
        raise AssertionError("an infrastructure id was reported")

    with pytest.raises(BaseExceptionGroup) as error:
        play(nothing_happens, sky)
    assert error.group_contains(InfrastructureError, match="accelerators: unknown", depth=None)
    assert sky.calls == []


def test_no_machines() -> None:
    async def nothing_happens(scene: Scene) -> None:
        pass

    sky = FakeSky(no_machines="no L4 in any region")
    scene, code = play(nothing_happens, sky)
    assert code != 0
    assert final(scene).type.value == "CRASHED"
    assert "could not launch: no L4 in any region" in (final(scene).message or "")
    assert sky.asked("down") == [scene.cluster], "what a failed launch leaves behind costs money"


@pytest.mark.parametrize(
    ("end", "words"),
    [(JobState.FAILED, "the job failed"), (JobState.FAILED_SETUP, "setup script"), (None, "The cluster was lost")],
)
def test_an_end_without_a_word_from_the_flow_run_is_a_crash(end: JobState | None, words: str) -> None:
    sky = FakeSky(output=("Traceback: it broke",))

    async def ends(scene: Scene) -> None:
        await scene.until(sky.running)
        await scene.set(Running())
        sky.preempt(scene.cluster) if end is None else sky.end(scene.cluster, end)

    scene, code = play(ends, sky)
    assert code != 0
    assert final(scene).type.value == "CRASHED"
    assert words in (final(scene).message or "")
    assert sky.clusters == {}


def test_a_job_that_never_starts_its_flow_run_is_a_crash() -> None:
    sky = FakeSky()

    async def ends(scene: Scene) -> None:
        await scene.until(sky.running)
        sky.end(scene.cluster, JobState.SUCCEEDED)

    scene, _ = play(ends, sky)
    assert final(scene).type.value == "CRASHED"
    assert "without starting the flow run" in (final(scene).message or "")


def test_a_silent_api_server_is_asked_again() -> None:
    sky = FakeSky()

    async def silence(scene: Scene) -> None:
        await scene.until(sky.running)
        sky.silent = 5
        while sky.silent:  # each poll finds nobody
            await asyncio.sleep(0.05)
        await completes(scene)

    scene, code = play(silence, sky)
    assert (code, final(scene).type.value) == (0, "COMPLETED")


def test_prefect_that_does_not_answer_keeps_no_machine() -> None:
    sky = FakeSky()

    async def silence(scene: Scene) -> None:
        async def read(flow_run_id: Any) -> FlowRun:
            raise httpx.ConnectError("nobody there")

        await scene.until(sky.running)
        scene.worker.client.read_flow_run = read  # type: ignore[method-assign]
        sky.end(scene.cluster, JobState.FAILED)

    scene, code = play(silence, sky)
    assert code != 0
    assert sky.clusters == {}
    assert final(scene).type.value == "CRASHED"


def test_a_stopped_worker_leaves_the_job_running() -> None:
    sky = FakeSky(output=("a line",))

    async def stopped(scene: Scene) -> None:
        await scene.until(sky.running)
        await scene.set(Running())
        scene.stopped = True

    scene, _ = play(stopped, sky)
    assert list(sky.clusters) == [scene.cluster]
    assert final(scene).type.value == "RUNNING"
    waiting = [thread for thread in threading.enumerate() if thread.name.startswith("sky ")]
    assert all(thread.daemon for thread in waiting), "a worker that ends waits for no output"
    sky.end(scene.cluster, JobState.SUCCEEDED)


async def kill(scene: Scene) -> None:
    await scene.worker.kill_infrastructure(str(scene.place), scene.configuration)


def test_cancelled_while_it_runs() -> None:
    sky = FakeSky()

    async def cancelled(scene: Scene) -> None:
        await scene.until(sky.running)
        await scene.set(Cancelling())
        await kill(scene)

    scene, code = play(cancelled, sky)
    assert (code, final(scene).type.value) == (0, "CANCELLED")
    assert sky.asked("cancel") == [scene.cluster]
    assert sky.clusters == {}


def test_cancelled_while_machines_are_looked_for() -> None:
    """The infrastructure id is known by then: Prefect cancels pending flow runs by it."""
    sky = FakeSky(hold=True)

    async def cancelled(scene: Scene) -> None:
        await scene.until(sky.launching)
        await scene.client.update_flow_run(scene.flow_run.id, infrastructure_pid=str(scene.place))
        await scene.set(Cancelling())
        await scene.worker._cancel_run(scene.flow_run.id)  # what its observer of cancellations calls

    scene, code = play(cancelled, sky)
    assert (code, final(scene).type.value) == (0, "CANCELLED")
    assert sky.clusters == {}
    assert not sky.running.is_set()


def test_cancelled_before_there_was_a_cluster_to_bring_down() -> None:
    """The launch was queued and goes on; what it brings up is brought down again."""
    sky = FakeSky(hold=True)

    async def cancelled(scene: Scene) -> None:
        await scene.until(sky.launching)
        await scene.set(Cancelling())
        sky.release.set()

    scene, _ = play(cancelled, sky)
    assert final(scene).type.value == "CANCELLED"
    assert sky.clusters == {}


def test_a_shared_cluster_is_left_up() -> None:
    sky = FakeSky()
    scene, _ = play(completes, sky, cluster="mine")
    assert scene.cluster == "mine"
    assert list(sky.clusters) == ["mine"]
    assert sky.autostops == [None]

    asyncio.run(kill(scene))
    assert list(sky.clusters) == ["mine"], "killing a flow run ends its job only"


def test_slurm_has_no_autostop() -> None:
    sky = FakeSky()
    play(completes, sky, infra="slurm/here")
    assert sky.autostops == [None]


def test_what_cannot_be_killed_is_told_apart() -> None:
    async def kill_id(sky: FakeSky, text: str) -> None:
        worker = SkyWorker(work_pool_name=POOL)
        worker.sky = lambda: sky
        await worker.kill_infrastructure(text, SkyJobConfiguration(cluster=None))

    with pytest.raises(InfrastructureNotFound, match="is gone"):
        asyncio.run(kill_id(FakeSky(), "no-cluster/job"))
    with pytest.raises(InfrastructureNotAvailable, match="not of the form"):
        asyncio.run(kill_id(FakeSky(), "1234"))
    with pytest.raises(InfrastructureNotAvailable, match="does not answer"):
        asyncio.run(kill_id(FakeSky(silent=100), "cluster/job"))


def test_output_is_in_the_flow_run_s_log_until_it_logs_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(APILogHandler, "emit", lambda self, record: logged.append(record.getMessage()))
    sky = FakeSky(output=("\x1b[32msetup\x1b[0m", "and so on"))
    scene, _ = play(completes, sky)
    text = "\n".join(logged)
    assert "looking for machines" in text
    shown = capsys.readouterr().out
    assert f"{scene.place.job} | and so on" in shown  # type: ignore[union-attr]
    _, quiet = play(completes, FakeSky(output=("never shown",)), stream_output=False)
    assert quiet == 0
    assert "never shown" not in capsys.readouterr().out
