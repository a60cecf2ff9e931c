"""An event loop without a clock and without I/O, on which a program can be run under every order of its steps.

Where several callbacks are ready, `ChoiceLoop` takes the one that the schedule says instead of the oldest. Timers fire
only when nothing is ready. `every_schedule` enumerates the schedules with at most `delays` departures from the order
of a real loop ("delay bounding": orders that real loops never produce are among them, none that they do with as many
departures is missing).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from typing import Any


class LostWakeUp(AssertionError):
    """Nothing is ready, no timer runs, and the program has not ended."""


class ChoiceLoop(asyncio.SelectorEventLoop):
    """`choices[i]` is taken at the i-th point where there is more than one callback; 0, the oldest, beyond its end.
    `widths` records how many there were."""

    def __init__(self, choices: tuple[int, ...]) -> None:
        super().__init__()
        self.widths: list[int] = []
        self._choices = choices
        self._clock = 0.0

    def time(self) -> float:
        return self._clock

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        timers: Any = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0].cancelled():
            heapq.heappop(timers)._scheduled = False
        if not ready and timers:
            self._clock = max(self._clock, timers[0].when())
        while timers and timers[0].when() <= self._clock:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            if not timer.cancelled():
                ready.append(timer)
        if not ready:
            raise LostWakeUp
        index = 0
        if len(ready) > 1:
            point = len(self.widths)
            index = self._choices[point] if point < len(self._choices) else 0
            self.widths.append(len(ready))
        handle = ready[index]
        del ready[index]
        if not handle.cancelled():
            handle._run()


def run_once(program: Callable[[], Coroutine[Any, Any, None]], choices: tuple[int, ...]) -> list[int]:
    """Run the program to its end under one schedule; returns the widths of its choice points."""
    loop = ChoiceLoop(choices)
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(program())
        return loop.widths
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def every_schedule(program: Callable[[], Coroutine[Any, Any, None]], delays: int) -> int:
    """Run the program under every schedule with at most `delays` departures; returns how many there were. A failure
    is raised again with the schedule that showed it, for `run_once`."""
    todo: list[tuple[int, ...]] = [()]
    count = 0
    while todo:
        choices = todo.pop()
        try:
            widths = run_once(program, choices)
        except BaseException as error:
            error.add_note(f"under the schedule {choices}")
            raise
        count += 1
        if sum(map(bool, choices)) < delays:
            for point in range(len(choices), len(widths)):
                padding = (0,) * (point - len(choices))
                todo.extend((*choices, *padding, other) for other in range(1, widths[point]))
    return count
