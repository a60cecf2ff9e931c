"""One flow run as a SkyPilot job: its task, its place, and the calls about it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import anyio

from .output import Output
from .port import ClusterLost, Job, JobPlace, SkyPilot, Unreachable
from .task import build_task, read_task_file, slug, stops_by_itself
from .variables import SkyJobConfiguration

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """A blocking call of SkyPilot's client, in a thread of its own; left alone when nobody waits for it any more.

    A daemon thread: the output of a job can go on for days, and a worker that is stopped does not wait for it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def work() -> None:
        result, error = None, None
        try:
            result = call(*args, **kwargs)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=f"sky {getattr(call, '__name__', 'call')}", daemon=True).start()
    return await future


class Flight:
    """Raises InfrastructureError for job variables that make no task."""

    def __init__(
        self, sky: SkyPilot, configuration: SkyJobConfiguration, flow_run_id: str, environ: Mapping[str, str]
    ) -> None:
        self.sky, self.configuration = sky, configuration
        name = f"{slug(configuration.name or 'flow-run', 40)}-{flow_run_id[:8]}"
        # Never the same twice: a retry must not meet the cluster that is being brought down after the first attempt.
        own = f"prefect-{flow_run_id[:8]}-{secrets.token_hex(2)}"
        self.place = JobPlace(configuration.cluster or own, name)
        self.task = build_task(
            configuration,
            read_task_file(Path(configuration.task)) if configuration.task else {},
            name=name,
            command=configuration.command or "prefect flow-run execute",
            env={key: value for key, value in configuration.env.items() if value is not None},
            environ=environ,
        )

    @property
    def own_cluster(self) -> bool:
        """Whether the cluster is there for this flow run alone, and goes with it."""
        return self.configuration.cluster is None

    @property
    def autostop_minutes(self) -> int | None:
        return self.configuration.autostop_minutes if self.own_cluster and stops_by_itself(self.task) else None

    async def check(self) -> None:
        await in_thread(self.sky.check, self.task)

    async def launch(self, say: Callable[[str], None]) -> None:
        await in_thread(
            self.sky.launch,
            self.task,
            self.place.cluster,
            autostop_minutes=self.autostop_minutes,
            retry_until_up=self.configuration.retry_until_up,
            say=say,
        )

    async def look(self) -> Job | None:
        return await in_thread(self.sky.job, self.place.cluster, self.place.job)

    async def follow(self, output: Output, ended: anyio.Event) -> None:
        """The job's output from beginning to end. It is only for reading: polls decide what happened."""
        try:
            found = await self.look()
            if found is not None:
                await in_thread(self.sky.follow, self.place.cluster, found.number, output.line)
        except (ClusterLost, Unreachable) as error:
            output.line(f"(the output breaks off: {error})")
        ended.set()

    async def down(self) -> None:
        await in_thread(self.sky.down, self.place.cluster)


async def cancel(sky: SkyPilot, place: JobPlace, *, grace_s: float, poll_s: float, down: bool) -> None:
    """Ask the job to end, wait at most `grace_s` for that, then bring its cluster down if `down`.

    Also calls off a launch that is under way. Raises ClusterLost, Unreachable.
    """
    try:
        found = await in_thread(sky.job, place.cluster, place.job)
        if found is not None and not found.state.ended:
            await in_thread(sky.cancel, place.cluster, found.number)
            with anyio.move_on_after(grace_s):
                while found is not None and not found.state.ended:
                    await anyio.sleep(min(poll_s, 2.0))
                    found = await in_thread(sky.job, place.cluster, place.job)
    except Unreachable:
        if not down:
            raise
        # Still being set up, or its machines are silent: bringing it down is all there is.
    if down:
        await in_thread(sky.down, place.cluster)
