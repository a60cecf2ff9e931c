"""vLLM's HTTP interface, as much of it as an island uses. Every failure is an EngineError."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import httpx

from sprawl.rollout.engine import EngineError
from sprawl.rollout.wire import Sample, VersionSpan

_NOT_FINITE = -9999.0  # how vLLM sends NaN and -inf
_FOREVER = httpx.Timeout(10.0, read=None, pool=None)  # a paused request is silent for as long as the pause lasts


@dataclass(frozen=True)
class Wanted:
    """One sample. `stops` end it and stay in it; `salt` keeps its prefix out of the cache of other versions."""

    input_ids: Sequence[int]
    max_new_tokens: int
    temperature: float
    seed: int
    stops: Sequence[int]
    salt: str

    def body(self, request_id: str, stream: bool) -> dict[str, Any]:
        sampling = {
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed & ((1 << 63) - 1),  # any integer is a seed; vLLM takes 64 bits and -1 as none
            "stop_token_ids": list(self.stops),
            "ignore_eos": True,  # the run says what ends a sample: it is among `stops`
            "logprobs": 0,
            "detokenize": False,
        }
        return {
            "request_id": request_id,
            "token_ids": list(self.input_ids),
            "sampling_params": sampling,
            "cache_salt": self.salt,
            "stream": stream,
        }


@dataclass
class Chunks:
    """What has come of one sample."""

    product: ClassVar[str] = "vLLM"
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    spans: list[VersionSpan] | None = None

    def add(self, choice: dict[str, Any]) -> list[tuple[int, float]]:
        """Take a (part of a) choice; returns its new tokens. Raises EngineError for log-probs that are no numbers."""
        content = (choice.get("logprobs") or {}).get("content") or []
        new = [(int(entry["token_id"]), float(entry["logprob"])) for entry in content]
        if [token for token, _ in new] != list(choice.get("token_ids") or []):
            raise EngineError(f"{self.product} sent tokens without their log-probs")
        if any(not logprob > _NOT_FINITE for _, logprob in new):
            raise EngineError("the weights produced non-finite logits")
        self.token_ids += [token for token, _ in new]
        self.logprobs += [logprob for _, logprob in new]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if choice.get("weight_versions") is not None:
            self.spans = [span_of(entry) for entry in choice["weight_versions"]]
        return new

    def sample(self, cut: int | None = None) -> Sample:
        """The sample, or its first `cut` tokens. Raises EngineError when it was broken off by somebody else, or when
        nobody can say which version made which token."""
        if cut is None and self.finish_reason not in ("stop", "length"):
            raise EngineError(f"{self.product} broke the request off ({self.finish_reason})")
        count = len(self.token_ids)
        edges = [0, *(span.end for span in self.spans or [])]
        if edges[-1] != count or [span.start for span in self.spans or []] != edges[:-1]:
            raise EngineError(f"{self.product} did not say which version made each of {count} tokens")
        count = count if cut is None else cut
        spans = [span.model_copy(update={"end": min(span.end, count)}) for span in self.spans or []]
        reason: Literal["stop", "length"] = "length" if cut is None and self.finish_reason == "length" else "stop"
        return Sample(
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            finish_reason=reason,
            spans=[span for span in spans if span.start < span.end],
        )


class Api:
    """A client of one server, by its Unix socket."""

    product: ClassVar[str] = "vLLM"

    def __init__(self, socket_path: str, key: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=socket_path, limits=limits),
            base_url="http://vllm",
            headers={"Authorization": f"Bearer {key}"},
            timeout=_FOREVER,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def healthy(self, timeout_s: float) -> bool:
        """Whether it answers, and says that its engine lives."""
        return await self.health(timeout_s) == 200

    async def health(self, timeout_s: float) -> int | None:
        """The status of /health, None when there is no answer in time."""
        try:
            return (await self._client.get("/health", timeout=timeout_s)).status_code
        except httpx.HTTPError:
            return None

    async def context_length(self) -> int:
        """The longest prompt plus answer that it takes. Raises EngineError."""
        async with self._spoken():
            answer = await self._client.get("/v1/models", timeout=30.0)
        try:
            return int(answer.json()["data"][0]["max_model_len"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise EngineError(f"{self.product} does not say how long a request may be: {words_of(answer)}") from None

    async def call(self, method: str, timeout_s: float = 60.0, arguments: dict[str, str] | None = None) -> list[Any]:
        """Call a method of every worker. Returns what each answered. Raises EngineError with the server's own words."""
        body = {"method": method, "kwargs": arguments or {}}
        answer = await self.command("/collective_rpc", timeout_s, body)
        return list(answer.json()["results"])

    async def command(self, route: str, timeout_s: float, body: Any = None, **query: str) -> httpx.Response:
        """One of the administrative routes. Raises EngineError with the server's own words."""
        with_what = {} if body is None else {"json": body}
        async with self._spoken():
            answer = await self._client.post(route, params=query, timeout=timeout_s, **with_what)
        if answer.status_code != 200:
            raise EngineError(f"{self.product} refused {route}: {words_of(answer)}")
        return answer

    async def generate(self, wanted: Wanted, watch: Callable[[int, float], bool] | None = None) -> Sample:
        """One sample; `watch` sees its tokens as they come, and True ends it. Cancelling ends it in the server too:
        vLLM drops what nobody listens to. Raises EngineError."""
        if watch is not None:
            return await self._stream(wanted, watch)
        chunks = Chunks()
        async with self._spoken():
            answer = await self._client.post("/inference/v1/generate", json=wanted.body(_name(), stream=False))
        if answer.status_code != 200:
            raise EngineError(f"{self.product} answered {answer.status_code}: {words_of(answer)}")
        chunks.add(answer.json()["choices"][0])
        return chunks.sample()

    async def _stream(self, wanted: Wanted, watch: Callable[[int, float], bool]) -> Sample:
        name = _name()
        body = wanted.body(name, stream=True)
        return await self._hear_out("/inference/v1/generate", body, name, Chunks(), _choices, watch)

    async def _hear_out(
        self,
        route: str,
        body: dict[str, Any],
        name: str,
        heard: Chunks,
        pieces: Callable[[AsyncIterator[str]], AsyncIterator[dict[str, Any]]],
        watch: Callable[[int, float], bool],
    ) -> Sample:
        """A streamed sample; `pieces` makes what `heard` takes out of the lines. Which version made a token is said at
        the end, so a row that the watch ends is aborted (by `name`) and heard out."""
        cut: int | None = None
        async with self._spoken(), self._client.stream("POST", route, json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise EngineError(f"{self.product} answered {answer.status_code}: {words_of(answer)}")
            async for piece in pieces(answer.aiter_lines()):
                seen = len(heard.token_ids)
                for number, (token, logprob) in enumerate(heard.add(piece), seen + 1):
                    if cut is None and watch(token, logprob):
                        cut = number
                        await self._abort(name)
        return heard.sample(cut)

    @asynccontextmanager
    async def _spoken(self) -> AsyncIterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise EngineError(f"{self.product} does not answer: {type(error).__name__}") from error

    async def _abort(self, name: str) -> None:
        """Nothing happens when the request has ended meanwhile."""
        await self.command("/inference/v1/abort_requests", 30.0, {"request_ids": [f"generate-tokens-{name}"]})


async def events_of(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events."""
    async for line in lines:
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)


async def _choices(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for event in events_of(lines):
        if "error" in event:
            raise EngineError(f"vLLM broke the request off: {event['error']}")
        for choice in event.get("choices", []):
            yield choice


def span_of(entry: dict[str, Any]) -> VersionSpan:
    try:
        return VersionSpan(version=int(entry["version"]), start=entry["start"], end=entry["end"])
    except ValueError:
        raise EngineError(f"the server names a version {entry['version']!r} that no island gave it") from None


def words_of(answer: httpx.Response) -> str:
    try:
        said = answer.json()
    except ValueError:
        said = answer.text
    if isinstance(said, dict):
        said = said.get("error", said.get("detail", said))
    if isinstance(said, dict):
        said = said.get("message", said)
    return " ".join(str(said).split())[:400]


def _name() -> str:
    return secrets.token_hex(12)
