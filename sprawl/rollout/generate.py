"""POST /generate: tokens or text in, tokens out, one group. Understands what clients of SGLang send, and answers with
what they read besides the samples.

Streamed, an event a token: `{"index", "text", "output_ids", "logprobs", "weight_versions", "finish_reason"}`, each
with what is new since the last one of that index; then one event that is the whole answer, then `[DONE]`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, StrictBool, StrictInt, model_validator
from starlette.requests import Request
from starlette.responses import Response

from sprawl.rollout.http import read_model
from sprawl.rollout.neutral import SGLANG_REQUEST, SGLANG_SAMPLING, drop_neutral
from sprawl.rollout.sampling import derive_seeds
from sprawl.rollout.service import Answer, Service
from sprawl.rollout.stream import Generation, Piece, respond
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, Sample, SamplingParams

DEFAULT_TOKENS = 128  # SGLang's; fewer where the context is shorter


class GenerateSampling(SamplingParams):
    """`SamplingParams` and what the sidecar itself looks after."""

    stop: str | list[str] | None = Field(None, description="Strings; the text ends before the first.")
    no_stop_trim: StrictBool = Field(False, description="The text keeps the stop string.")
    sampling_seed: StrictInt | None = Field(None, description="One seed, from which each sample's is derived.")

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, data: Any) -> Any:
        return drop_neutral(data, cls.model_fields, SGLANG_SAMPLING)

    @model_validator(mode="after")
    def _one_kind_of_seed(self) -> GenerateSampling:
        if self.seeds is not None and self.sampling_seed is not None:
            raise ValueError("give seeds or sampling_seed, not both")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    def for_engine(self, room: int) -> SamplingParams:
        """The engine's part. `room` is what the context leaves; only the default yields to it."""
        given = "max_new_tokens" in self.model_fields_set
        seeds = self.seeds if self.sampling_seed is None else derive_seeds(self.sampling_seed, self.n)
        return SamplingParams(
            n=self.n,
            max_new_tokens=self.max_new_tokens if given else max(1, min(DEFAULT_TOKENS, room)),
            temperature=self.temperature,
            seeds=seeds,
            stop_token_ids=self.stop_token_ids,
            resume=self.resume,
        )


class GenerateBody(GenerateRequest):
    """What the route accepts: `GenerateRequest` and the options of SGLang that mean something here."""

    sampling_params: GenerateSampling = GenerateSampling()
    stream: StrictBool = False
    return_logprob: StrictBool = False
    rid: str | None = Field(None, max_length=200, description="Comes back as meta_info.id.")

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, data: Any) -> Any:
        return drop_neutral(data, cls.model_fields, SGLANG_REQUEST)


class Group:
    """The `Shape` of this route."""

    def __init__(self, wanted: GenerateBody, generation: Generation) -> None:
        self._wanted, self._generation = wanted, generation
        self._service = generation.service

    def whole(self, answer: Answer) -> dict[str, Any]:
        samples = [self._with_text(index, sample) for index, sample in enumerate(answer.groups[0])]
        alone = samples[0] if len(samples) == 1 else None
        response = GenerateResponse(
            samples=samples,
            weight_version_start=answer.version_start,
            weight_version_end=answer.version_end,
            island_id=self._service.island_id,
            run_id=answer.run_id,
            text=alone.text if alone else None,
            output_ids=alone.token_ids if alone else None,
            meta_info=self._meta_info(answer, alone),
        )
        return response.model_dump()

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            "text": piece.text,
            "output_ids": [piece.token],
            "logprobs": [piece.logprob],
            "weight_versions": piece.spans,
            "finish_reason": None,
        }

    def last_chunks(self, answer: Answer) -> list[dict[str, Any]]:
        return [self.whole(answer)]

    def _with_text(self, index: int, sample: Sample) -> Sample:
        sampling = self._wanted.sampling_params
        if sampling.stops and not sampling.no_stop_trim:
            cursor = self._generation.cursors[index]
            cursor.finish()
            return sample.model_copy(update={"text": cursor.text})
        return sample.model_copy(update={"text": self._service.text_of(sample.token_ids)})

    def _meta_info(self, answer: Answer, alone: Sample | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._wanted.rid,
            "weight_version": str(answer.version_start),
            "weight_version_start": answer.version_start,
            "weight_version_end": answer.version_end,
            "prompt_tokens": len(self._generation.prompts[0]),
            "completion_tokens": sum(len(sample.token_ids) for sample in answer.groups[0]),
        }
        if alone is not None:
            meta["finish_reason"] = self._finish_reason(alone)
            meta["weight_versions"] = [span.model_dump() for span in alone.spans]
            if self._wanted.return_logprob:
                pairs = zip(alone.logprobs, alone.token_ids, strict=True)
                meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        return meta

    def _finish_reason(self, sample: Sample) -> dict[str, Any]:
        if sample.finish_reason != "stop":
            return {"type": sample.finish_reason, "length": len(sample.token_ids)}
        stopped = self._generation.cursors[0].matched
        return {"type": "stop", "matched": sample.token_ids[-1] if stopped is None else stopped}


async def generate(request: Request, service: Service) -> Response:
    """The handler. Raises what `sprawl.rollout.http.response_of` turns into an answer."""
    wanted = await read_model(request, GenerateBody)
    prompt = wanted.input_ids if wanted.input_ids is not None else await service.encode(wanted.text or "")
    sampling = wanted.sampling_params
    generation = Generation(
        service,
        [prompt],
        sampling.for_engine(service.engine.limits.max_length - len(prompt)),
        wanted.weight_version,
        stops=sampling.stops,
        streamed=wanted.stream,
        observed=bool(sampling.stops),
    )
    return await respond(request, generation, Group(wanted, generation))
