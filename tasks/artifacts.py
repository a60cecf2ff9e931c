"""Artifacts that can never hold up training: written in a helper thread, behind a circuit breaker.

A Prefect server that has gone away makes each artifact call block for a minute before it fails. So a call is made in a
daemon thread, at most one at a time; while one is under way new ones are dropped, and after a few failures none is
tried for a while. What an artifact shows is on the board anyway.
"""

from __future__ import annotations

import contextvars
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import httpx

logger = logging.getLogger(__name__)


class ArtifactGate:
    """Circuit breaker around artifact writes. Used from one thread (the flow's).

    timeout_s: a write that takes longer counts as failed (it is abandoned, not interrupted).
    max_failures: failures in a row that open the breaker, for `cooldown_s`; then one write is tried again.
    on_pause: told, in one line, each time the breaker opens.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 20.0,
        max_failures: int = 3,
        cooldown_s: float = 120.0,
        on_pause: Callable[[str], None] = logger.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._max_failures = max_failures
        self._cooldown_s = cooldown_s
        self._on_pause = on_pause
        self._clock = clock
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._failures = 0
        self._open_until = 0.0

    @property
    def open(self) -> bool:
        """True while writes are not even tried."""
        with self._lock:
            return self._clock() < self._open_until

    def submit(self, write: Callable[[], Any]) -> bool:
        """Run `write` in the helper thread; returns at once. False when it was dropped."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            if self._clock() - self._began <= self._timeout_s:
                return False
            self._thread = None
            self._failed(f"no answer within {self._timeout_s:g} s")
        if self.open:
            return False
        context = contextvars.copy_context()  # Prefect's settings travel in it
        self._began = self._clock()
        self._thread = threading.Thread(target=context.run, args=(self._run, write), daemon=True, name="artifacts")
        self._thread.start()
        return True

    def drain(self, timeout_s: float) -> None:
        """Wait for the write under way, but no longer than `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except Exception as error:  # whatever it is, it must not reach training
            if threading.current_thread() is self._thread:
                self._failed(f"{type(error).__name__}: {error}")
        else:
            with self._lock:
                self._failures = 0

    def _failed(self, why: str) -> None:
        with self._lock:
            self._failures += 1
            opened = self._failures >= self._max_failures
            if opened:
                self._open_until = self._clock() + self._cooldown_s
        logger.info("artifact not written: %s", why)
        if opened:
            self._on_pause(f"Prefect takes no artifacts ({why}); they pause, training goes on")


def artifact_key(*parts: str) -> str:
    """Prefect allows lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


class ArtifactWriter:
    """Writes artifacts of one flow run through a client of its own, with a short timeout. Blocks: use it in a gate.

    Each key is one artifact, updated in place: a run that is watched for weeks leaves behind its last page, not all.
    """

    def __init__(self, flow_run_id: UUID | str | None, timeout_s: float = 10.0) -> None:
        self._flow_run_id = UUID(str(flow_run_id)) if flow_run_id else None
        self._timeout_s = timeout_s
        self._ids: dict[str, UUID] = {}

    def markdown(self, key: str, text: str, description: str) -> None:
        self._write("markdown", key, text, description)

    def table(self, key: str, rows: list[dict[str, Any]], description: str) -> None:
        self._write("table", key, json.dumps(rows), description)

    def progress(self, key: str, percent: float, description: str) -> None:
        self._write("progress", key, percent, description)

    def _write(self, kind: str, key: str, data: Any, description: str) -> None:
        from prefect.client.schemas.actions import ArtifactCreate

        with self._client() as client:
            known = self._ids.get(key)
            if known is not None and _updated(client, known, data, description):
                return
            artifact = ArtifactCreate(
                type=kind, key=key, data=data, description=description, flow_run_id=self._flow_run_id
            )
            self._ids[key] = client.create_artifact(artifact).id

    def _client(self) -> Any:
        from prefect.client.orchestration import get_client

        # Settings of its own make it a client of its own: the flow's is in use by the flow's thread.
        return get_client(httpx_settings={"timeout": self._timeout_s}, sync_client=True)


def _updated(client: Any, artifact_id: UUID, data: Any, description: str) -> bool:
    """Overwrite an artifact; False when the server does not have it (any more).

    Not `client.update_artifact`: that emits an event with the whole content each time, which the server keeps for a
    week.
    """
    try:
        client.request("PATCH", f"/artifacts/{artifact_id}", json={"data": data, "description": description})
    except httpx.HTTPStatusError as error:
        if error.response.status_code == 404:
            return False
        raise
    return True
