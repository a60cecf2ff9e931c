"""The worker: takes flow runs from its work pool and runs each as a SkyPilot job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import httpx
from prefect.exceptions import InfrastructureNotAvailable, InfrastructureNotFound, ObjectNotFound
from prefect.states import Cancelled, Crashed
from prefect.utilities.engine import propose_state
from prefect.workers.base import BaseWorker, BaseWorkerResult

from .flight import Flight, cancel
from .outcome import Outcome, outcome_of
from .output import Output
from .port import ClusterLost, JobPlace, JobState, LaunchAborted, LaunchFailed, SkyPilot, Unreachable
from .sdk import SkySdk
from .task import is_loopback, places, stops_by_itself
from .variables import SkyJobConfiguration, SkyVariables

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

DOWN_TRIES = 3
UNREACHABLE_NOTICE_S = 60.0


class SkyWorkerResult(BaseWorkerResult):
    """`identifier` is `cluster/job`."""


class SkyWorker(BaseWorker[SkyJobConfiguration, SkyVariables, SkyWorkerResult]):
    type = "skypilot"
    job_configuration = SkyJobConfiguration
    job_configuration_variables = SkyVariables
    _display_name = "SkyPilot"
    _description = "Run flow runs on any cloud, Kubernetes or Slurm cluster that SkyPilot reaches, one node or many."
    _documentation_url = "https://docs.skypilot.co"
    sky: Callable[[], SkyPilot] = SkySdk
    """How to reach SkyPilot; tests put a fake here."""

    async def run(
        self,
        flow_run: FlowRun,
        configuration: SkyJobConfiguration,
        task_status: anyio.abc.TaskStatus[str] | None = None,  # type: ignore[override]
    ) -> SkyWorkerResult:
        """Launch, wait for the end, bring the cluster down.

        `task_status` gets the infrastructure id before the launch, which may take hours where machines are short: a
        flow run can be cancelled then already. Raises InfrastructureError before that for job variables that make no
        task. A worker that is stopped leaves the job running: the flow run reports for itself, and the idle cluster
        ends by its autostop.
        """
        logger = self.get_flow_run_logger(flow_run)
        job = Flight(self.sky(), configuration, flow_run.id.hex, os.environ)
        task = job.task
        await job.check()
        if is_loopback(task["envs"].get("PREFECT_API_URL")):
            logger.warning(
                "PREFECT_API_URL is %s, which other machines cannot reach; set it in the job variable env",
                task["envs"]["PREFECT_API_URL"],
            )
        if job.own_cluster and configuration.autostop_minutes and not stops_by_itself(task):
            logger.info(
                "No autostop on Slurm: should this worker be gone when the job ends, run: sky down %s",
                job.place.cluster,
            )
        if task_status is not None:
            task_status.started(str(job.place))
        logger.info("SkyPilot: job %s on %s", job.place, ", ".join(places(task)) or "whatever is cheapest")
        output = Output(job.place.job, self._show if configuration.stream_output else _nowhere, logger.info)
        async with anyio.create_task_group() as around:
            around.start_soon(self._relay, flow_run, output, configuration.stream_output)
            outcome = await self._drive(flow_run, job, output)
            around.cancel_scope.cancel()
        try:
            await self._report(flow_run, outcome, output)
        finally:
            if job.own_cluster:
                await self._give_back(flow_run, job)
        return SkyWorkerResult(identifier=str(job.place), status_code=outcome.code)

    async def kill_infrastructure(
        self, infrastructure_pid: str, configuration: SkyJobConfiguration, grace_seconds: int = 30
    ) -> None:
        """Cancel the job, give it `grace_seconds` to end, and bring its cluster down unless it is a shared one.

        Also calls off a launch that is under way. Raises InfrastructureNotFound when the cluster is gone, and
        InfrastructureNotAvailable when SkyPilot does not answer, or the id is not ours.
        """
        try:
            place = JobPlace.parse(infrastructure_pid)
        except ValueError as error:
            raise InfrastructureNotAvailable(str(error)) from None
        own = configuration.cluster is None
        try:
            await cancel(self.sky(), place, grace_s=grace_seconds, poll_s=configuration.poll_s, down=own)
        except ClusterLost as error:
            raise InfrastructureNotFound(f"{place.cluster} is gone: {error}") from None
        except Unreachable as error:
            raise InfrastructureNotAvailable(f"SkyPilot does not answer about {place}: {error}") from None

    # -- the life of one job

    async def _drive(self, flow_run: FlowRun, job: Flight, output: Output) -> Outcome:
        """From the launch to the end of the job, whatever that end is."""
        try:
            await job.launch(output.line)
        except LaunchAborted as error:
            return outcome_of(None, await self._flow_state(flow_run), lost=str(error))
        except LaunchFailed as error:
            outcome = outcome_of(None, await self._flow_state(flow_run), lost=str(error))
            return Outcome(1, f"SkyPilot could not launch: {error}") if outcome.crash else outcome
        # Cancelled while the launch was queued and there was no cluster to bring down yet.
        if await self._flow_state(flow_run) in ("CANCELLED", "CANCELLING"):
            return outcome_of(JobState.CANCELLED, await self._flow_state(flow_run))
        async with anyio.create_task_group() as around:
            ended = anyio.Event()
            state: JobState | None
            around.start_soon(job.follow, output, ended)
            state, lost = None, None
            try:
                state = await self._wait(flow_run, job, ended)
            except ClusterLost as error:
                lost = str(error)
            around.cancel_scope.cancel()
        return outcome_of(state, await self._flow_state(flow_run), lost=lost)

    async def _wait(self, flow_run: FlowRun, job: Flight, ended: anyio.Event) -> JobState:
        """Poll until the job has ended. Raises ClusterLost."""
        silent_since: float | None = None
        while True:
            try:
                found = await job.look()
                if found is None:
                    raise ClusterLost(f"{job.place.cluster} does not know the job {job.place.job}")
                if found.state.ended:
                    return found.state
                silent_since = None
            except Unreachable as error:
                now = time.monotonic()
                if silent_since is None or now - silent_since > UNREACHABLE_NOTICE_S:
                    self.get_flow_run_logger(flow_run).warning("SkyPilot does not answer, asking on: %s", error)
                    silent_since = now
            with anyio.move_on_after(job.configuration.poll_s):
                await ended.wait()
                await anyio.sleep(min(1.0, job.configuration.poll_s))  # its state follows its output shortly
                ended = anyio.Event()

    async def _report(self, flow_run: FlowRun, outcome: Outcome, output: Output) -> None:
        """Say what the flow run could not say itself. Raises httpx.HTTPError when Prefect does not answer."""
        if outcome.cancelled:
            await self.client.set_flow_run_state(flow_run.id, Cancelled(message="Cancelled, its job too."), force=True)
        elif outcome.crash is not None:
            if last := output.last():
                self.get_flow_run_logger(flow_run).error("The last lines of the job's output:\n%s", last)
            await propose_state(self.client, Crashed(message=outcome.crash), flow_run_id=flow_run.id)

    async def _give_back(self, flow_run: FlowRun, job: Flight) -> None:
        """Bring the flow run's own cluster down; says so in its log when that does not work."""
        logger = self.get_flow_run_logger(flow_run)
        for attempt in range(1, DOWN_TRIES + 1):
            try:
                await job.down()
                return
            except ClusterLost:
                return
            except Unreachable as error:
                logger.warning("Cluster %s is not down yet (attempt %d): %s", job.place.cluster, attempt, error)
                await anyio.sleep(job.configuration.poll_s)
        logger.error("Cluster %s may still be up and cost money: sky down %s", *[job.place.cluster] * 2)

    async def _relay(self, flow_run: FlowRun, output: Output, wanted: bool) -> None:
        """Send output to the flow run's log until the flow run has started."""
        try:
            while wanted and not output.flow_started:
                await anyio.sleep(2.0)
                output.flush()
                output.flow_started = await self._flow_state(flow_run) not in ("SCHEDULED", "PENDING", None)
        finally:
            if wanted:
                output.flush()

    async def _flow_state(self, flow_run: FlowRun) -> str | None:
        """The type of the flow run's state now; None when nobody can say."""
        try:
            state = (await self.client.read_flow_run(flow_run.id)).state
        except ObjectNotFound:
            return "CANCELLED"  # deleted: nobody wants it any more
        except httpx.HTTPError as error:
            self._logger.warning("Prefect does not answer about flow run %s: %s", flow_run.id, error)
            return None
        return state.type.value if state is not None else None

    def _show(self, line: str) -> None:
        print(line, file=sys.stdout, flush=True)


def _nowhere(line: str) -> None:
    """For workers whose terminal is not to show the output."""
