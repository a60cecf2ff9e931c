"""The subset of the OpenAI requests that a sidecar understands. What would be ignored is refused instead; parameters
that only ever make sense at their neutral value are accepted at that value, because clients send them."""

from __future__ import annotations

import time
import uuid
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, field_validator, model_validator

from sprawl.rollout.neutral import OPENAI, drop_neutral
from sprawl.rollout.sampling import derive_seeds
from sprawl.rollout.wire import SamplingParams, VersionPolicy


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: StrictBool = False


class OpenAIRequest(BaseModel):
    """What both routes share. `weight_version` and `return_token_ids` are ours; the rest is the OpenAI API."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    default_tokens: ClassVar[int]

    model: str | None = Field(None, description="Any name: an island serves one model.")
    max_tokens: StrictInt | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    n: StrictInt = Field(1, ge=1, le=1024)
    stop: str | list[str] | None = Field(None, description="Strings; the text ends before the first.")
    seed: StrictInt | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted; has no effect.")
    return_token_ids: StrictBool = False
    weight_version: VersionPolicy = VersionPolicy()

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, data: Any) -> Any:
        return drop_neutral(data, cls.model_fields, OPENAI)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    @property
    def limit(self) -> int | None:
        """New tokens asked for, None where the default holds."""
        return self.max_tokens

    def sampling(self, room: int) -> SamplingParams:
        """The engine's parameters. Sample i of a seeded request has its own seed, derived from `seed` and i. `room` is
        what the context leaves; only the default yields to it."""
        seeds = derive_seeds(self.seed, self.n) if self.seed is not None else None
        limit = self.limit or max(1, min(self.default_tokens, room))
        return SamplingParams(n=self.n, max_new_tokens=limit, temperature=self.temperature, seeds=seeds)


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions. `prompt`: a string, token ids, or a list of either."""

    default_tokens: ClassVar[int] = 16

    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    logprobs: StrictInt | None = Field(None, ge=0, le=1, description="0 or 1: log-probs of the sampled tokens.")

    @field_validator("prompt", mode="before")
    @classmethod
    def _shape(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            items = value if isinstance(value[0], (list, str)) else [value]
            if all(isinstance(item, str) for item in items) or all(
                isinstance(item, list) and all(type(token) is int for token in item) for item in items
            ):
                return value
        raise ValueError("must be a string, a list of token ids, or a non-empty list of either")

    @property
    def prompts(self) -> list[str | list[int]]:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", self.prompt if several else [self.prompt])

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message with text. Those of tools carry more, which the model's chat template makes of it what it can."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: text, and only the keys that are there."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {**self.model_dump(exclude_none=True), "content": text}


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions. Messages with text content."""

    default_tokens: ClassVar[int] = 256

    messages: list[Message] = Field(min_length=1)
    logprobs: StrictBool = False
    max_completion_tokens: StrictInt | None = Field(None, ge=1, description="The newer name of max_tokens.")

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def envelope(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """id, object, created, model: the head of every OpenAI answer and chunk."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
