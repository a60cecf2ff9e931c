"""The engine port: what generates tokens from one set of weights, and how those weights are exchanged.

An engine knows nothing of boards or policies. The gate decides when a swap may happen; the engine guarantees that
nothing computed with the old weights (KV caches, prefixes) is used after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sprawl.rollout.wire import Sample, SamplingParams

if TYPE_CHECKING:
    from sprawl.board.reader import Served

Watch = Callable[[int, int, float], bool]
"""Sees every token as it is sampled: (row, token id, log-prob). True ends that row there. Called on the engine's own
thread, so it must be quick and must not touch an event loop directly."""


class EngineError(Exception):
    """The engine could not finish a request (non-finite logits, closed in the middle). The request may be retried
    on another island."""


@dataclass(frozen=True)
class Trouble:
    """Why an engine cannot generate now. `terminal`: it will not recover by itself."""

    message: str
    terminal: bool = False


@dataclass(frozen=True)
class EngineLimits:
    """What a request must stay within to be accepted."""

    vocab_size: int
    max_length: int  # prompt plus new tokens, per row
    max_batch_tokens: int  # rows x (prompt + new tokens) of one request
    resumes: bool = False  # takes SamplingParams.resume and goes on as if it had sampled those tokens itself


class Engine(Protocol):
    """Every method is called from one event loop. `pause`, `swap` and `resume` are called by one caller at a time."""

    limits: EngineLimits

    async def load(self, served: Served) -> None:
        """Take the first weights, or begin anew with these after a swap that failed. The engine copies: `served.state`
        may be patched afterwards."""

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, watch: Watch | None = None
    ) -> list[Sample]:
        """Sample one group: `params.n` continuations of one prompt, each with version spans that say which weights
        generated which token. Cancelling the call stops the work before the next token. Raises EngineError.

        `params.resume` is only given where `limits.resumes`: samples then hold what comes after those tokens, bit for
        bit what an undisturbed generation of the whole group with the same seeds would have had there."""

    async def pause(self) -> None:
        """Return once no forward pass runs. Generations in flight freeze between two tokens."""

    async def swap(self, served: Served, changed: AbstractSet[str]) -> None:
        """Replace the weights, under `pause`. `changed` names the tensors that differ from the last load or swap.
        Every cache derived from the old weights is dropped or recomputed before the next token. A swap that raises, or
        whose `resume` does, leaves the engine at the old weights or without any: it never serves something between."""

    async def resume(self) -> None:
        """Let frozen generations continue. Raises when the new weights turn out to be unfit."""

    def trouble(self) -> Trouble | None:
        """Why it cannot generate now, for a reason of its own; None while it can, and before the first weights."""

    def info(self) -> dict[str, Any]:
        """Facts for /server_info: kind, dtype, requests queued and running, tokens generated, swaps."""

    async def close(self) -> None:
        """Stop. Requests in flight end with EngineError. Idempotent."""


@runtime_checkable
class TellsVersion(Protocol):
    """An engine whose watches run between two forward passes, so that the version it names inside one is the version
    that made the token shown. Others leave it out: after a swap their streams name versions at the end only."""

    @property
    def watched_version(self) -> int | None: ...
