"""/v1/completions and /v1/chat/completions over a Service, streaming included.

Every answer carries `weight_version_start` and `weight_version_end`; every choice carries `weight_versions`, the spans
of its tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sprawl.rollout.chat import render_chat
from sprawl.rollout.engine import Watch
from sprawl.rollout.http import ClientGone, error_response, read_model, response_of, unless_disconnected
from sprawl.rollout.openai_types import ChatRequest, CompletionRequest, OpenAIRequest, envelope
from sprawl.rollout.service import Answer, Service
from sprawl.rollout.text import TextCursor
from sprawl.rollout.wire import Sample


async def completions(request: Request, service: Service) -> Response:
    """POST /v1/completions."""
    wanted = await read_model(request, CompletionRequest)
    prompts = [service.tokenizer.encode(p) if isinstance(p, str) else p for p in wanted.prompts]
    return await _answer(request, Call(service, wanted, prompts, chat=False))


async def chat_completions(request: Request, service: Service) -> Response:
    """POST /v1/chat/completions."""
    wanted = await read_model(request, ChatRequest)
    messages = [message.model_dump() for message in wanted.messages]
    prompt = render_chat(service.tokenizer.chat_template, service.files, messages)
    return await _answer(request, Call(service, wanted, [service.tokenizer.encode(prompt)], chat=True))


@dataclass
class Call:
    """One request in progress: its prompts and the text of every choice as it grows."""

    service: Service
    wanted: OpenAIRequest
    prompts: list[list[int]]
    chat: bool
    cursors: list[TextCursor] = field(init=False)
    events: asyncio.Queue[tuple[int, str, int, float] | None] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        tokenizer = self.service.tokenizer
        self.cursors = [
            TextCursor(tokenizer.decode, tokenizer.eos_ids, self.wanted.stops)
            for _ in range(len(self.prompts) * self.wanted.n)
        ]
        kind = "chat.completion" if self.chat else "text_completion"
        self.head = envelope(
            kind + (".chunk" if self.chat and self.wanted.stream else ""),
            "chatcmpl" if self.chat else "cmpl",
            self.wanted.model or self.service.run_id,
        )

    async def generate(self) -> Answer:
        loop = asyncio.get_running_loop()

        def watch(prompt: int) -> Watch:
            def see(row: int, token: int, logprob: float) -> bool:
                choice = prompt * self.wanted.n + row
                piece = self.cursors[choice].push(token)
                if self.wanted.stream:
                    loop.call_soon_threadsafe(self.events.put_nowait, (choice, piece, token, logprob))
                return self.cursors[choice].stopped

            return see

        return await self.service.generate(self.prompts, self.wanted.sampling(), self.wanted.weight_version, watch)

    # --- whole answers ---

    def whole(self, answer: Answer) -> dict[str, Any]:
        samples = [sample for group in answer.groups for sample in group]
        choices = [self._choice(index, sample) for index, sample in enumerate(samples)]
        return {**self.head, "choices": choices, "usage": self.usage(answer), **versions(answer)}

    def _choice(self, index: int, sample: Sample) -> dict[str, Any]:
        self.cursors[index].finish()
        text = self.cursors[index].text
        choice: dict[str, Any] = {"index": index, "finish_reason": sample.finish_reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(sample.token_ids, sample.logprobs)
        choice["weight_versions"] = [span.model_dump() for span in sample.spans]
        if self.wanted.return_token_ids:
            choice["token_ids"] = sample.token_ids
            choice["prompt_token_ids"] = self.prompts[index // self.wanted.n]
        return choice

    def _logprobs(self, token_ids: list[int], logprobs: list[float]) -> dict[str, Any] | None:
        if not self.wanted.wants_logprobs:
            return None
        texts = [self.service.tokenizer.decode([token]) for token in token_ids]
        if self.chat:
            pairs = zip(texts, logprobs, strict=True)
            return {
                "content": [
                    {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                    for text, value in pairs
                ]
            }
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": None}

    def usage(self, answer: Answer) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        made = sum(len(sample.token_ids) for group in answer.groups for sample in group)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    # --- chunks ---

    def chunk(self, choice: int, piece: str, token: int | None, logprob: float | None, **more: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice, "finish_reason": None}
        if self.chat:
            body["delta"] = {"role": "assistant", "content": piece}
        else:
            body["text"] = piece
        known = token is not None and logprob is not None
        body["logprobs"] = self._logprobs([token], [logprob]) if known else None  # type: ignore[list-item]
        if self.wanted.return_token_ids:
            body["token_ids"] = [] if token is None else [token]
        return {**self.head, "choices": [{**body, **more}]}

    def last_chunks(self, answer: Answer) -> list[dict[str, Any]]:
        """The held-back text, finish reason and spans of every choice; the versions ride on all of them."""
        chunks = []
        for index, sample in enumerate(sample for group in answer.groups for sample in group):
            rest = self.cursors[index].finish()
            spans = [span.model_dump() for span in sample.spans]
            chunk = self.chunk(index, rest, None, None, finish_reason=sample.finish_reason, weight_versions=spans)
            chunks.append({**chunk, **versions(answer)})
        if self.wanted.stream_options is not None and self.wanted.stream_options.include_usage:
            chunks.append({**self.head, "choices": [], "usage": self.usage(answer), **versions(answer)})
        return chunks


def versions(answer: Answer) -> dict[str, int]:
    return {"weight_version_start": answer.version_start, "weight_version_end": answer.version_end}


async def _answer(request: Request, call: Call) -> Response:
    if not call.wanted.stream:
        return JSONResponse(call.whole(await unless_disconnected(request.receive, call.generate())))
    work = asyncio.ensure_future(call.generate())
    work.add_done_callback(lambda _: call.events.put_nowait(None))
    try:
        # The status line is not sent before the first token, so that a refusal is a status and not an event.
        first = await unless_disconnected(request.receive, call.events.get())
        if first is None:
            work.result()
    except BaseException:
        await _stop(work)
        raise
    return EventStream(call, first, work)


class EventStream(Response):
    """Server-sent events of one generation, which is stopped when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, first: tuple[int, str, int, float] | None, work: asyncio.Future[Answer]) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._call, self._first, self._work = call, first, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await unless_disconnected(receive, self._send_all(send))
        finally:
            await _stop(self._work)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._data():
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _data(self) -> AsyncIterator[str]:
        event = self._first
        while event is not None:
            yield json.dumps(self._call.chunk(*event))
            event = await self._call.events.get()
        try:
            answer = self._work.result()
        except Exception as error:
            yield _error_event(error)
            return
        for chunk in self._call.last_chunks(answer):
            yield json.dumps(chunk)
        yield "[DONE]"


def _error_event(error: Exception) -> str:
    """The status is sent already: the error of a broken-off stream is its last event, without [DONE] after it."""
    try:
        return bytes(response_of(error).body).decode()
    except Exception as unexpected:
        return bytes(error_response(500, "InternalError", str(unexpected)).body).decode()


async def _stop(work: asyncio.Future[Answer]) -> None:
    work.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await work
