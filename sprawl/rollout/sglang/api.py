"""SGLang's HTTP interface, as much of it as an island uses. Every failure is an EngineError.

`POST /generate` answers `output_ids` and, in `meta_info`, `output_token_logprobs` ([log-prob, token id, text] each),
`finish_reason` and, once a request has ended, `weight_versions` (which version made which tokens). A stream repeats
what came before in every event.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx

from sprawl.rollout.engine import EngineError
from sprawl.rollout.vllm.api import Api, Chunks, Wanted, events_of, span_of, words_of
from sprawl.rollout.wire import Sample

_FOREVER = httpx.Timeout(10.0, read=None, pool=None)  # a paused request is silent for as long as the pause lasts


def body_of(wanted: Wanted, rid: str, stream: bool) -> dict[str, Any]:
    """The request, tokens in and tokens out. `extra_key` keeps its prefix out of the cache of other versions."""
    return {
        "rid": rid,
        "input_ids": list(wanted.input_ids),
        "sampling_params": {
            "max_new_tokens": wanted.max_new_tokens,
            "temperature": wanted.temperature,
            "sampling_seed": wanted.seed & ((1 << 63) - 1),  # any integer is a seed; SGLang's are 64 bits, signed
            "stop_token_ids": list(wanted.stops),
            "ignore_eos": True,  # the run says what ends a sample: it is among `stops`
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": wanted.salt,
        "stream": stream,
    }


@dataclass
class Heard(Chunks):
    """What has come of one sample; every event holds all tokens so far."""

    product: ClassVar[str] = "SGLang"

    def add(self, choice: dict[str, Any]) -> list[tuple[int, float]]:
        """Take an event or an answer; returns its new tokens. Raises EngineError for log-probs that are no numbers."""
        meta = choice["meta_info"]
        pairs = [(entry[1], entry[0]) for entry in meta.get("output_token_logprobs") or []]
        tokens = [token for token, _ in pairs]
        if tokens != list(choice.get("output_ids") or []):
            raise EngineError("SGLang sent tokens without their log-probs")
        if tokens[: len(self.token_ids)] != self.token_ids:
            raise EngineError("SGLang took tokens back that it had sent")
        new = pairs[len(self.token_ids) :]
        if any(logprob is None or not math.isfinite(logprob) for _, logprob in new):
            raise EngineError("the weights produced non-finite logits")
        self.token_ids += [token for token, _ in new]
        self.logprobs += [float(logprob) for _, logprob in new]
        if meta.get("finish_reason"):
            self.finish_reason = meta["finish_reason"]["type"]
        if meta.get("weight_versions") is not None:
            self.spans = [span_of(entry) for entry in meta["weight_versions"] if entry["start"] < entry["end"]]
        return new


class SglangApi(Api):
    """A client of one server, by its port on loopback."""

    product = "SGLang"

    def __init__(self, port: int, key: str) -> None:
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {key}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            timeout=_FOREVER,
            trust_env=False,  # no proxy between an island and its own engine
        )
        self._aborts: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        aborts = list(self._aborts)
        for task in aborts:
            task.cancel()
        await super().close()
        await asyncio.gather(*aborts, return_exceptions=True)

    async def ask(self, route: str, timeout_s: float) -> dict[str, Any]:
        """The answer of a GET. Raises EngineError."""
        async with self._spoken():
            answer = await self._client.get(route, timeout=timeout_s)
        if answer.status_code != 200:
            raise EngineError(f"SGLang refused {route}: {words_of(answer)}")
        said: dict[str, Any] = answer.json()
        return said

    async def generate(self, wanted: Wanted, watch: Callable[[int, float], bool] | None = None) -> Sample:
        """One sample; `watch` sees its tokens as they come, and True ends it. Cancelling ends it in the server too,
        by name: SGLang looks for clients that left only every few seconds. Raises EngineError."""
        rid = secrets.token_hex(12)
        try:
            return await (self._whole(wanted, rid) if watch is None else self._events(wanted, rid, watch))
        except (asyncio.CancelledError, EngineError):
            if not self._client.is_closed:  # else the server ends too
                task = asyncio.ensure_future(self._forget(rid))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)
            raise

    async def _whole(self, wanted: Wanted, rid: str) -> Sample:
        heard = Heard()
        async with self._spoken():
            answer = await self._client.post("/generate", json=body_of(wanted, rid, stream=False))
        if answer.status_code != 200:
            raise EngineError(f"SGLang answered {answer.status_code}: {words_of(answer)}")
        heard.add(answer.json())
        return heard.sample()

    async def _events(self, wanted: Wanted, rid: str, watch: Callable[[int, float], bool]) -> Sample:
        return await self._hear_out("/generate", body_of(wanted, rid, stream=True), rid, Heard(), _answers, watch)

    async def _abort(self, name: str) -> None:
        """Nothing happens when the request has ended meanwhile."""
        await self.command("/abort_request", 30.0, {"rid": name})

    async def _forget(self, rid: str) -> None:
        with contextlib.suppress(EngineError):  # who does not answer is ended by the watchdog
            await self._abort(rid)


async def _answers(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for event in events_of(lines):
        if "error" in event:
            raise EngineError(f"SGLang broke the request off: {event['error'].get('message', event['error'])}")
        yield event
