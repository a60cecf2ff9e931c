"""What an island does with one request, without HTTP: check it, hold a ticket while it is generated, vouch for the
versions of the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sprawl.policy.tokenizer import Tokenizer
from sprawl.rollout.continuation import resumed
from sprawl.rollout.counters import Connections, Counters
from sprawl.rollout.engine import Engine, EngineError, TellsVersion, Watch
from sprawl.rollout.gate import Gate, Ticket
from sprawl.rollout.reconciler import Reconciler
from sprawl.rollout.refusals import BadRequest, Busy
from sprawl.rollout.together import together
from sprawl.rollout.wire import Sample, SamplingParams, ServerInfo, VersionPolicy, identity

MAX_ACTIVE = 256  # requests held at once, waiting ones included; more are sent elsewhere
LONG_TEXT = 1 << 16  # characters from which on a text is tokenised beside the event loop

See = Callable[[int, int, float, int | None], bool]
"""Sees every token as it is sampled: (row, token id, log-prob, version); True ends that row there. The version is None
where it is not known before the end. Called on the engine's own thread."""


@dataclass(frozen=True)
class Answer:
    """Samples of every prompt, in order, and the versions of the first and the last token generated."""

    groups: list[list[Sample]]
    version_start: int
    version_end: int
    run_id: str


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
    max_active: int = MAX_ACTIVE
    files: dict[str, bytes] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    connections: Connections = field(default_factory=Connections)
    held: int = 0  # requests inside `generate`

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        policy: VersionPolicy,
        see: Callable[[int], See] | None = None,
    ) -> Answer:
        """Sample `params.n` continuations of every prompt under one ticket. `see(i)` observes prompt i.

        Raises BadRequest, Refused (no acceptable version in time), GateClosed, Busy or EngineError. Cancelling it
        stops the generation.
        """
        for prompt in prompts:
            self._check(prompt, params)
        if self.held >= self.max_active:
            self.counters.turned_away += 1
            raise Busy(f"{self.held} requests are already held here")
        self.held += 1
        came = time.monotonic()
        try:
            async with self.gate.admit(policy, self.max_wait_s) as ticket:
                self.counters.waits.observe(time.monotonic() - came)
                groups = await together(
                    [
                        self._sample(p, params, self._watch(ticket, see(i)) if see else None)
                        for i, p in enumerate(prompts)
                    ]
                )
                return self._vouch(groups, prompts, ticket, resumes=params.resume is not None)
        except asyncio.CancelledError:
            self.counters.cancelled += 1
            raise
        except EngineError:
            self.counters.engine_errors += 1
            raise
        finally:
            self.held -= 1

    async def _sample(self, prompt: Sequence[int], params: SamplingParams, watch: Watch | None) -> list[Sample]:
        if params.resume is not None and not self.engine.limits.resumes:
            return await resumed(self.engine, prompt, params, self.tokenizer.eos_ids, watch)
        return await self.engine.generate(prompt, params, watch)

    def describe(self) -> ServerInfo:
        """The island as /server_info shows it."""
        follower = self.reconciler
        return ServerInfo(
            ready=self.ready,
            reason=None if self.ready else self.not_ready_reason,
            island_id=self.island_id,
            run_id=self.served_run,
            applied=None if self.gate.version is None else identity(self.served_run, self.gate.version),
            applied_version=self.gate.version,
            latest_seen=follower.latest_seen,
            sync_state=follower.state,
            commit_mode=self.gate.state.mode,
            follow=follower.follow,
            active_requests=self.gate.active,
            waiting_requests=len(self.gate.waiting),
            update_destination_ready=follower.terminal_error is None,
            update_destination_error=follower.terminal_error,
            versions_verified=follower.versions_verified,
            terminal_error=follower.terminal_error,
            metrics={
                "versions_applied": follower.versions_applied,
                "prepare_seconds": follower.prepare_seconds,
                "pause_seconds": follower.pause_seconds,
                "prompt_tokens": self.counters.prompt_tokens,
                "generated_tokens": self.counters.generated_tokens,
                "cancelled_requests": self.counters.cancelled,
            },
            engine=self.engine.info(),
        )

    @property
    def served_run(self) -> str:
        """The run in service: `run_id` until the gate was switched to another."""
        return self.gate.run_id or self.run_id

    @property
    def ready(self) -> bool:
        """Whether requests should be sent here. An island that follows demand is ready before it has any version."""
        waiting_for_first = self.gate.version is None and self.reconciler.follow == "eager"
        return self.gate.state.closed is None and not waiting_for_first and self.engine.trouble() is None

    @property
    def not_ready_reason(self) -> str:
        trouble = self.engine.trouble()
        now = self.gate.state.closed or (trouble.message if trouble else None) or self.reconciler.last_error
        return now or "the first version is not in service yet"

    async def encode(self, text: str) -> list[int]:
        """Token ids of `text`. A long one must not hold up the other requests."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text)
        return await asyncio.to_thread(self.tokenizer.encode, text)

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

    def _watch(self, ticket: Ticket, see: See) -> Watch:
        """`see` with the version of every token, as far as it is known at that moment."""
        engine = self.engine if isinstance(self.engine, TellsVersion) else None

        def watch(row: int, token: int, logprob: float) -> bool:
            if engine is not None:
                version = engine.watched_version
            else:
                # New weights come only after a commit has begun, and a token exists before it is shown.
                version = ticket.version if self.gate.state.begun == ticket.begun else None
            return see(row, token, logprob, version)

        return watch

    def _vouch(
        self, groups: list[list[Sample]], prompts: Sequence[Sequence[int]], ticket: Ticket, *, resumes: bool
    ) -> Answer:
        """Hold what the engine says against the ticket and the gate. Raises EngineError: it must not be passed on."""
        samples = [sample for group in groups for sample in group]
        newest = self.gate.state.newest
        assert newest is not None
        for sample in samples:
            covered = sample.spans[-1].end if sample.spans else 0
            # Only a sample that was resumed can have been complete before its first token.
            if covered != len(sample.token_ids) or (not covered and not resumes):
                raise EngineError("the engine did not say which version made which token")
        versions = [span.version for sample in samples for span in sample.spans] or [ticket.version]
        refused = [version for version in versions if not ticket.policy.accepts(version)]
        if refused:
            raise EngineError(f"tokens were generated by version {refused[0]}, which the request does not accept")
        absent = [version for version in versions if not ticket.version <= version <= newest]
        if absent:
            raise EngineError(f"the engine names version {absent[0]}, which was not in service while it generated")
        self.counters.prompt_tokens += sum(map(len, prompts))
        self.counters.generated_tokens += sum(len(sample.token_ids) for sample in samples)
        return Answer(groups, min(versions), max(versions), ticket.run_id or self.run_id)
