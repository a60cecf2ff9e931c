"""Spot continuation: what a preempted island had generated is kept, and another one goes on after the last token.

Two halves. The client's (`Progress`) collects a stream token by token and puts the samples together in the end; each
token keeps its log-prob, and its span says which version made it and where. The island's (`resumed`) is for engines
that cannot resume by themselves: every sample becomes a request of its own, whose prompt ends in the tokens it has.

An engine that can (`EngineLimits.resumes`) is given `SamplingParams.resume` as it is and goes on at the same place of
each seed's random numbers, so that the tokens are those of a generation that nobody disturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sprawl.rollout.engine import Engine, Watch
from sprawl.rollout.rows import Row
from sprawl.rollout.sampling import derive_seeds
from sprawl.rollout.together import together
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, Sample, SamplingParams, VersionSpan


@dataclass
class Partial:
    """A sample so far. `spans` cover its tokens, end to end, each with the island that made them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def push(self, token: int, logprob: float, version: int, island_id: str) -> None:
        end = len(self.token_ids) + 1
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.version, last.island_id) == (version, island_id):
            self.spans[-1] = last.model_copy(update={"end": end})
        else:
            self.spans.append(VersionSpan(version=version, start=end - 1, end=end, island_id=island_id))
        self.token_ids.append(token)
        self.logprobs.append(logprob)

    def copy(self) -> Partial:
        return Partial(list(self.token_ids), list(self.logprobs), list(self.spans))


@dataclass
class Progress:
    """A group so far, one `Partial` a sample."""

    rows: list[Partial]

    @classmethod
    def start(cls, samples: int) -> Progress:
        return cls([Partial() for _ in range(samples)])

    @property
    def tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    def copy(self) -> Progress:
        return Progress([row.copy() for row in self.rows])

    def request(self, request: GenerateRequest) -> GenerateRequest:
        """The request that asks for the rest."""
        if not self.tokens:
            return request
        resume = [list(row.token_ids) for row in self.rows]
        params = request.sampling_params.model_copy(update={"resume": resume})
        return request.model_copy(update={"sampling_params": params})

    def completed(self, response: GenerateResponse) -> GenerateResponse:
        """The whole answer: what was there before, and the rest as `response` has it (checked by the caller)."""
        samples = [
            _joined(row, sample, response.island_id) for row, sample in zip(self.rows, response.samples, strict=True)
        ]
        versions = [span.version for sample in samples for span in sample.spans]
        return response.model_copy(
            update={
                "samples": samples,
                "weight_version_start": min(versions),
                "weight_version_end": max(versions),
            }
        )


def _joined(row: Partial, sample: Sample, island_id: str) -> Sample:
    before = len(row.token_ids)
    rest = [
        VersionSpan(version=span.version, start=span.start + before, end=span.end + before, island_id=island_id)
        for span in sample.spans
    ]
    return sample.model_copy(
        update={
            "token_ids": [*row.token_ids, *sample.token_ids],
            "logprobs": [*row.logprobs, *sample.logprobs],
            "spans": [*row.spans, *rest],
            # The island saw the end only, and its own routing of tokens that another one had sampled.
            **({"text": None, "routed_experts": None} if before else {}),
        }
    )


async def resumed(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, eos_ids: Sequence[int], watch: Watch | None = None
) -> list[Sample]:
    """`Engine.generate` for `params.resume` on an engine that cannot resume: the rest of every sample, in order.

    The rest is drawn with a seed of its own, derived from the sample's and the number of tokens it has: right in
    distribution and repeatable, but not the tokens that one engine alone would have drawn.
    """
    assert params.resume is not None
    stops = {*eos_ids, *params.stop_token_ids}

    async def rest(row: int, taken: list[int]) -> Sample:
        so_far = Row.after(taken, stops, params.max_new_tokens)
        if so_far.finished is not None:
            return so_far.sample()
        seeds = None
        if params.seeds is not None:
            seeds = [derive_seeds(params.seeds[row], len(taken) + 1)[-1]]
        alone = params.model_copy(
            update={
                "n": 1,
                "seeds": seeds,
                "resume": None,
                "max_new_tokens": params.max_new_tokens - len(taken),
            }
        )
        see = None if watch is None else lambda _, token, logprob: watch(row, token, logprob)
        return (await engine.generate([*prompt, *taken], alone, see))[0]

    return await together(rest(row, taken) for row, taken in enumerate(params.resume))
