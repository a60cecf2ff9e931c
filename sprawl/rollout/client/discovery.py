"""Islands from a list of URLs instead of a board."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from sprawl.board.records import IslandRecord
from sprawl.errors import SprawlError

ANSWER_S = 2.0
INTERVAL_S = 2.0


class Seen(BaseModel):
    """What a client needs of /server_info."""

    model_config = ConfigDict(extra="ignore")

    ready: bool
    applied_version: int | None = None
    active_requests: int = 0
    terminal_error: str | None = None


def listed(urls: Sequence[str], *, token: str | None = None) -> Callable[[], list[IslandRecord]]:
    """A `discover` for `RolloutClient`: asks every sidecar of a fixed list how it is. One that does not answer counts
    as lost until it does. `token` defaults to $SPRAWL_TOKEN. Raises SprawlError for a URL that is none."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise SprawlError(f"{url!r} is no URL of a sidecar", "write http://HOST:PORT or https://HOST:PORT")
    if not urls:
        raise SprawlError("the list of islands is empty", "name at least one URL, or read the islands off the board")
    token = token if token is not None else os.environ.get("SPRAWL_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask(url: str) -> IslandRecord:
        error = None
        seen = Seen(ready=False)
        try:
            answer = httpx.get(f"{url.rstrip('/')}/server_info", headers=headers, timeout=ANSWER_S)
            answer.raise_for_status()
            seen = Seen.model_validate_json(answer.content)
        except (httpx.HTTPError, ValidationError) as problem:
            error = f"{type(problem).__name__}: {problem}".splitlines()[0]
        failed = seen.terminal_error is not None
        return IslandRecord(
            island_id=url,
            url=url,
            state="ready" if seen.ready else "failed" if failed else "starting",
            applied=seen.applied_version,
            started_at=0.0,
            heartbeat_at=0.0 if error else time.time(),
            interval_s=INTERVAL_S,
            last_error=error or seen.terminal_error,
        )

    def discover() -> list[IslandRecord]:
        with ThreadPoolExecutor(min(16, len(urls))) as pool:
            return list(pool.map(ask, urls))

    return discover
