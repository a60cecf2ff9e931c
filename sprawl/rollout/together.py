"""Several generations that succeed or fail as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def together(generations: Iterable[Awaitable[T]]) -> list[T]:
    """Await all; when one fails, or the caller is cancelled, stop the others and wait until they have ended."""
    tasks = [asyncio.ensure_future(generation) for generation in generations]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
