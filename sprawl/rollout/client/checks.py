"""Holding an answer against what was asked. Pure; a client trusts an island's word for nothing that it can check.

What is found is said as one line; None means that nothing is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sprawl.rollout.wire import GenerateRequest, GenerateResponse, Sample, SamplingParams, VersionPolicy, VersionSpan


def generation_fault(response: GenerateResponse, request: GenerateRequest) -> str | None:
    """What is wrong with the answer to `request`: number of samples, tokens, log-probs, spans, versions."""
    params, wanted = request.sampling_params, request.weight_version
    if wanted.run_id is not None and response.run_id != wanted.run_id:
        return f"an answer of run {response.run_id}, asked for was {wanted.run_id}"
    if len(response.samples) != params.n:
        return f"{len(response.samples)} samples instead of {params.n}"
    given = [len(row) for row in params.resume] if params.resume is not None else [0] * params.n
    for sample, taken in zip(response.samples, given, strict=True):
        if fault := sample_fault(sample, params, taken) or span_fault(sample.spans, wanted):
            return fault
    versions = [span.version for sample in response.samples for span in sample.spans]
    claimed = (response.weight_version_start, response.weight_version_end)
    if versions and claimed != (min(versions), max(versions)):
        return f"it claims versions {claimed[0]} to {claimed[1]}, its spans say {min(versions)} to {max(versions)}"
    return None


def sample_fault(sample: Sample, params: SamplingParams, taken: int = 0) -> str | None:
    """What is wrong with one sample by itself. `taken`: tokens before its first that the request brought along."""
    count = len(sample.token_ids)
    if sample.finish_reason == "abort" or (not count and not taken):
        return "a sample that was broken off"
    if len(sample.logprobs) != count or not covers(sample.spans, count):
        return "a sample whose log-probs or version spans do not cover its tokens"
    if count + taken > params.max_new_tokens:
        return f"{count + taken} tokens where {params.max_new_tokens} were allowed"
    if sample.finish_reason == "length" and count + taken < params.max_new_tokens:
        return f"a sample of {count + taken} tokens that says it reached {params.max_new_tokens}"
    if any(token in params.stop_token_ids for token in sample.token_ids[:-1]):
        return "a sample that goes on after a stop token"
    if not all(math.isfinite(value) and value <= LARGEST for value in sample.logprobs):
        return "log-probs that are none"
    return None


LARGEST = 1e-3
"""Rounding can leave the log-prob of a certain token a little above 0."""


def span_fault(spans: Sequence[VersionSpan], policy: VersionPolicy) -> str | None:
    """Tokens of a version that the policy does not accept, or versions that go back: no island ever does."""
    for span in spans:
        if not policy.accepts(span.version):
            return f"tokens of version {span.version}, which the request does not accept"
    for one, other in itertools.pairwise(spans):
        if other.version < one.version:
            return f"tokens of version {other.version} after those of version {one.version}"
    return None


def covers(spans: Sequence[VersionSpan], count: int) -> bool:
    """Whether the spans lie end to end over [0, count), none of them empty."""
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            return False
        position = span.end
    return position == count


def completion_fault(body: Mapping[str, Any], asked: Mapping[str, Any], policy: VersionPolicy) -> str | None:
    """What is wrong with an answer of /v1/completions or /v1/chat/completions (not streamed)."""
    try:
        choices = body["choices"]
        if len(choices) < asked.get("n", 1):
            return f"{len(choices)} choices instead of {asked.get('n', 1)}"
        if policy.run_id is not None and body["run_id"] != policy.run_id:
            return f"an answer of run {body['run_id']}, asked for was {policy.run_id}"
        every: list[int] = []
        for choice in choices:
            spans = [VersionSpan.model_validate(span) for span in choice["weight_versions"]]
            if fault := span_fault(spans, policy):
                return fault
            count = len(choice["token_ids"]) if asked.get("return_token_ids") else (spans[-1].end if spans else 0)
            if not spans or not covers(spans, count):
                return "a choice whose version spans do not cover its tokens"
            wants = asked.get("logprobs") not in (None, False)  # 0 is a wish on /v1/completions
            if wants and asked.get("return_token_ids") and len(logprobs_of(choice)) != count:
                return "a choice whose log-probs do not cover its tokens"
            every += [span.version for span in spans]
        claimed = (body["weight_version_start"], body["weight_version_end"])
        if claimed != (min(every), max(every)):
            return f"it claims versions {claimed[0]} to {claimed[1]}, its spans say {min(every)} to {max(every)}"
    except (KeyError, TypeError, IndexError, ValueError) as error:
        return f"its answer lacks what was asked for: {type(error).__name__}: {error}".splitlines()[0]
    return None


def logprobs_of(choice: Mapping[str, Any]) -> list[float]:
    """The sampled tokens' log-probs of a choice of either route, [] when there are none."""
    given = choice.get("logprobs") or {}
    if "content" in given:
        return [float(entry["logprob"]) for entry in given["content"] or []]
    return [float(value) for value in given.get("token_logprobs") or []]
