"""What an island does with one request, without HTTP: check it, hold a ticket while it is generated, vouch for the
versions of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from sprawl.policy.tokenizer import Tokenizer
from sprawl.rollout.continuation import resumed
from sprawl.rollout.engine import Engine, EngineError, Watch
from sprawl.rollout.gate import Gate
from sprawl.rollout.reconciler import Reconciler
from sprawl.rollout.refusals import BadRequest, Busy
from sprawl.rollout.wire import Sample, SamplingParams, ServerInfo, VersionPolicy

MAX_ACTIVE = 256  # requests held at once, waiting ones included; more are sent elsewhere


@dataclass
class Counters:
    """Totals since the start, for /metrics."""

    requests: dict[tuple[str, int], int] = field(default_factory=dict)  # (route, status) -> count
    prompt_tokens: int = 0
    generated_tokens: int = 0
    request_seconds: float = 0.0
    cancelled: int = 0

    def count(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] = self.requests.get((route, status), 0) + 1
        self.request_seconds += seconds


@dataclass(frozen=True)
class Answer:
    """Samples of every prompt, in order, and the versions of the first and the last token generated."""

    groups: list[list[Sample]]
    version_start: int
    version_end: int


@dataclass
class Service:
    """The parts of one island as the sidecar sees them. `files` are the checkpoint's, for its chat template."""

    island_id: str
    run_id: str
    engine: Engine
    gate: Gate
    reconciler: Reconciler
    tokenizer: Tokenizer
    max_wait_s: float = 30.0
    files: dict[str, bytes] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    held: int = 0  # requests inside `generate`

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        policy: VersionPolicy,
        watch: Callable[[int], Watch] | None = None,
    ) -> Answer:
        """Sample `params.n` continuations of every prompt under one ticket. `watch(i)` observes prompt i.

        Raises BadRequest, Refused (no acceptable version in time), GateClosed, Busy or EngineError. Cancelling it
        stops the generation.
        """
        for prompt in prompts:
            self._check(prompt, params)
        if self.held >= MAX_ACTIVE:
            raise Busy(f"{self.held} requests are already held here")
        self.held += 1
        try:
            async with self.gate.admit(policy, self.max_wait_s):
                groups = await _together(
                    [self._sample(p, params, watch(i) if watch else None) for i, p in enumerate(prompts)]
                )
        except asyncio.CancelledError:
            self.counters.cancelled += 1
            raise
        finally:
            self.held -= 1
        return self._vouch(groups, prompts, policy)

    async def _sample(self, prompt: Sequence[int], params: SamplingParams, watch: Watch | None) -> list[Sample]:
        if params.resume is not None and not self.engine.limits.resumes:
            return await resumed(self.engine, prompt, params, self.tokenizer.eos_ids, watch)
        return await self.engine.generate(prompt, params, watch)

    def describe(self) -> ServerInfo:
        """The island as /server_info shows it."""
        follower = self.reconciler
        return ServerInfo(
            ready=self.ready,
            island_id=self.island_id,
            run_id=self.run_id,
            applied=self.gate.version,
            latest_seen=follower.latest_seen,
            sync_state=follower.state,
            commit_mode=self.gate.state.mode,
            follow=follower.follow,
            active_requests=self.gate.active,
            versions_verified=follower.versions_verified,
            terminal_error=follower.terminal_error,
            engine=self.engine.info(),
        )

    @property
    def ready(self) -> bool:
        """Whether requests should be sent here. An island that follows demand is ready before it has any version."""
        waiting_for_first = self.gate.version is None and self.reconciler.follow == "eager"
        return self.gate.state.closed is None and not waiting_for_first

    @property
    def not_ready_reason(self) -> str:
        return self.gate.state.closed or self.reconciler.last_error or "the first version is not in service yet"

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Text of a completion; a final end-of-text token leaves no trace."""
        ids = list(token_ids)
        if ids and ids[-1] in self.tokenizer.eos_ids:
            ids.pop()
        return self.tokenizer.decode(ids)

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        limits = self.engine.limits
        if not prompt:
            raise BadRequest("input_ids", "the prompt is empty")
        taken = [token for row in params.resume or [] for token in row]
        for token in (min(prompt), max(prompt), *params.stop_token_ids, *taken):
            if not 0 <= token < limits.vocab_size:
                raise BadRequest("input_ids", f"token id {token} is outside the vocabulary of {limits.vocab_size}")
        length = len(prompt) + params.max_new_tokens
        if length > limits.max_length:
            raise BadRequest(
                "max_new_tokens",
                f"{len(prompt)} prompt + {params.max_new_tokens} new tokens exceed the context of {limits.max_length}",
            )
        if length * params.n > limits.max_batch_tokens:
            raise BadRequest(
                "n", f"{params.n} rows of {length} tokens exceed the {limits.max_batch_tokens} tokens of one request"
            )

    def _vouch(self, groups: list[list[Sample]], prompts: Sequence[Sequence[int]], policy: VersionPolicy) -> Answer:
        versions = [span.version for samples in groups for sample in samples for span in sample.spans]
        refused = [version for version in versions if not policy.accepts(version)]
        if refused:
            raise EngineError(f"tokens were generated by version {refused[0]}, which the request does not accept")
        self.counters.prompt_tokens += sum(map(len, prompts))
        self.counters.generated_tokens += sum(len(sample.token_ids) for samples in groups for sample in samples)
        return Answer(groups, min(versions), max(versions))


async def _together(generations: Sequence[Awaitable[list[Sample]]]) -> list[list[Sample]]:
    """Await all; when one fails, or the caller is cancelled, stop the others."""
    tasks = [asyncio.ensure_future(generation) for generation in generations]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
