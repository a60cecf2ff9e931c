"""The Prefect server this process talks to: which one, whether it answers, and how to leave when it does not."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping

import httpx
from prefect.context import refresh_global_settings_context
from prefect.events.worker import EventsWorker
from prefect.logging.configuration import setup_logging
from prefect.logging.handlers import APILogHandler, APILogWorker
from prefect.settings import PREFECT_API_URL
from prefect.utilities.urls import url_for

EXIT_GRACE_S = 5.0


def use(environment: Mapping[str, str]) -> None:
    """Adopt Prefect settings for this process, its threads and the processes it starts."""
    os.environ.update(environment)
    refresh_global_settings_context()


def reachable(timeout_s: float = 3.0) -> bool:
    """Whether the server of the current settings answers. False without one configured."""
    url = PREFECT_API_URL.value()
    if not url:
        return False
    try:
        return httpx.get(f"{url}/health", timeout=timeout_s).status_code == 200
    except httpx.HTTPError:
        return False


def flow_run_url(flow_run_id: str) -> str:
    """Page of a flow run in the UI; on a server of one's own in the newer UI, which renders all artifacts."""
    url = url_for("flow-run", obj_id=flow_run_id) or ""
    base = str(PREFECT_API_URL.value()).removesuffix("/api")
    return url.replace(f"{base}/runs/", f"{base}/v2/runs/")


def quiet_console() -> None:
    """Keep Prefect's own log out of the terminal; the server still gets all of it."""
    setup_logging()
    for name in (None, "prefect", "prefect._internal"):  # the last one prints whole events when a server is lost
        for handler in logging.getLogger(name).handlers:
            if not isinstance(handler, APILogHandler):
                handler.setLevel(logging.CRITICAL)


def flush(timeout_s: float = 5.0) -> None:
    """Send queued events and log lines now, where a server answers; call it before stopping that server."""
    if not reachable():
        return
    with contextlib.suppress(Exception):  # the view of a run is never a reason to fail it
        EventsWorker.drain_all(timeout=timeout_s)
        APILogWorker.drain_all(timeout=timeout_s)


def bound_exit(code: int) -> None:
    """Make this process end with `code` a few seconds from now at the latest.

    At exit Prefect's background threads retry every queued event against a server that is gone, for minutes.
    """
    timer = threading.Timer(EXIT_GRACE_S, os._exit, args=(code,))
    timer.daemon = True
    timer.start()
