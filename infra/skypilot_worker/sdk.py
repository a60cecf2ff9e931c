"""The port's adapter for SkyPilot's Python client. The client is imported at the first call: it takes seconds, and
Prefect loads every worker type at each of its commands."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .port import ClusterLost, InfrastructureError, Job, JobState, LaunchAborted, LaunchFailed, Unreachable

if TYPE_CHECKING:
    import sky

CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|<rich_\w+[^>]*>")
"""Colours, and what SkyPilot's own terminal would draw a spinner from."""


class SkySdk:
    """Stateless; may be used from several threads at once."""

    def check(self, task: Mapping[str, Any]) -> None:
        _task(task)

    def launch(
        self,
        task: Mapping[str, Any],
        cluster: str,
        *,
        autostop_minutes: int | None,
        retry_until_up: bool,
        say: Callable[[str], None],
    ) -> None:
        import sky
        from sky import exceptions

        lines = Lines(say)
        try:
            request = sky.launch(
                _task(task),
                cluster_name=cluster,
                idle_minutes_to_autostop=autostop_minutes,
                down=autostop_minutes is not None,
                retry_until_up=retry_until_up,
            )
            sky.stream_and_get(request, output_stream=lines)
        except exceptions.RequestCancelled:  # the server ends the request of a launch whose cluster is brought down
            raise LaunchAborted(f"the launch of {cluster} was called off") from None
        except Exception as error:
            raise LaunchFailed(one_line(error)) from error
        finally:
            lines.end()

    def job(self, cluster: str, name: str) -> Job | None:
        import sky

        with _explained(cluster):
            records = [item for item in sky.get(sky.queue(cluster, all_users=True)) if item["job_name"] == name]
        if not records:
            return None
        newest = max(records, key=lambda item: item["job_id"])
        return Job(newest["job_id"], name, JobState(newest["status"].value))

    def follow(self, cluster: str, number: int, write: Callable[[str], None]) -> None:
        import sky

        lines = Lines(write)
        with _explained(cluster):
            sky.tail_logs(cluster, number, follow=True, output_stream=lines)
        lines.end()

    def cancel(self, cluster: str, number: int) -> None:
        import sky

        with _explained(cluster):
            sky.get(sky.cancel(cluster, job_ids=[number]))

    def down(self, cluster: str) -> None:
        import sky

        with _explained(cluster):
            sky.get(sky.down(cluster))


def _task(task: Mapping[str, Any]) -> sky.Task:
    import sky

    try:
        return sky.Task.from_yaml_config(copy.deepcopy(dict(task)))  # which writes into what it is given
    except Exception as error:
        raise InfrastructureError(f"SkyPilot refuses the task: {one_line(error)}") from error


@contextmanager
def _explained(cluster: str) -> Iterator[None]:
    """Tells a cluster that is gone from one that could not be asked.

    When its machines do not answer, SkyPilot looks at what the cloud says about them; only then is it known which.
    """
    import requests

    import sky
    from sky import exceptions

    try:
        yield
    except exceptions.ClusterDoesNotExist as error:
        raise ClusterLost(one_line(error)) from error
    except (exceptions.ApiServerConnectionError, requests.exceptions.RequestException) as error:
        raise Unreachable(one_line(error)) from error
    except Exception as error:
        try:
            records = sky.get(sky.status([cluster], refresh=sky.StatusRefreshMode.FORCE, all_users=True))
        except Exception as second:
            raise Unreachable(one_line(second)) from error
        if not any(record["status"] == sky.ClusterStatus.UP for record in records):
            raise ClusterLost(one_line(error)) from error
        raise Unreachable(one_line(error)) from error


class Lines(io.TextIOBase):
    """A text stream that hands on whole lines, without colours; the last state of a line that was drawn over."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            self._hand_on(line)
        return len(text)

    def end(self) -> None:
        """Hand on what came without a line end."""
        rest, self._rest = self._rest, ""
        self._hand_on(rest)

    def _hand_on(self, line: str) -> None:
        line = CONTROL.sub("", line).rstrip().rpartition("\r")[2]
        if line.strip():
            self._write(line)


def one_line(error: BaseException) -> str:
    """An error's own words in one line, at most 500 characters."""
    text = " ".join(CONTROL.sub("", str(error)).split()) or type(error).__name__
    return text if len(text) <= 500 else f"{text[:497]}..."
