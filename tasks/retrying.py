"""Which failures of a task are worth another try."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.client.schemas.objects import State, TaskRun

from sprawl.errors import ConfigError, Diverged, FencedError, IntegrityError

HOPELESS = (ConfigError, Diverged, FencedError, IntegrityError)

_HALF_DONE = "half_done"


@contextmanager
def only_once() -> Iterator[None]:
    """What fails in here may have left something half done: `worth_retrying` says no to it."""
    try:
        yield
    except Exception as error:
        setattr(error, _HALF_DONE, True)
        raise


def worth_retrying(_task: Any, _run: TaskRun, state: State) -> bool:
    """Whether another try can help: not when this writer was fenced off, bytes are wrong, or `only_once` was left."""
    error = state.result(raise_on_failure=False)
    return not isinstance(error, HOPELESS) and not getattr(error, _HALF_DONE, False)
