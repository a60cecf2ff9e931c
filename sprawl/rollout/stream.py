"""One generation on its way to one client: the text of every choice as it grows, server-sent events, and the end of the
work when the client leaves. Shared by the three generating routes, which differ in their `Shape` only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sprawl.rollout.http import ClientGone, error_response, response_of, unless_disconnected
from sprawl.rollout.service import Answer, See, Service
from sprawl.rollout.text import TextCursor
from sprawl.rollout.wire import SamplingParams, VersionPolicy


@dataclass(frozen=True)
class Piece:
    """One token of one choice. `text` is what it adds to what may be shown; `version` is None where it is not known
    before the end."""

    choice: int
    position: int
    text: str
    token: int
    logprob: float
    version: int | None

    @property
    def spans(self) -> list[dict[str, int]] | None:
        """The version of this token in the form that whole answers have."""
        if self.version is None:
            return None
        return [{"version": self.version, "start": self.position, "end": self.position + 1}]


class Generation:
    """A request in progress: `len(prompts) * params.n` choices, those of a prompt adjacent.

    `observed`: the cursors follow the tokens, which costs two decodings each; needed for stop strings and streams.
    """

    def __init__(
        self,
        service: Service,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        policy: VersionPolicy,
        *,
        stops: Sequence[str],
        streamed: bool,
        observed: bool = True,
    ) -> None:
        self.service, self.prompts, self.params, self.policy = service, prompts, params, policy
        self.streamed, self._observed = streamed, observed or streamed
        tokenizer = service.tokenizer
        count = len(prompts) * params.n
        self.cursors = [TextCursor(tokenizer.decode, tokenizer.eos_ids, stops) for _ in range(count)]
        self.pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._seen = [0] * count

    async def run(self) -> Answer:
        """See `Service.generate`. Fills the cursors, and `pieces` when streamed."""
        loop = asyncio.get_running_loop()

        def see(prompt: int) -> See:
            def one(row: int, token: int, logprob: float, version: int | None) -> bool:
                choice = prompt * self.params.n + row
                text = self.cursors[choice].push(token)
                position, self._seen[choice] = self._seen[choice], self._seen[choice] + 1
                if self.streamed:
                    piece = Piece(choice, position, text, token, logprob, version)
                    loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
                return self.cursors[choice].stopped

            return one

        return await self.service.generate(self.prompts, self.params, self.policy, see if self._observed else None)


class Shape(Protocol):
    """How a route puts an answer: JSON objects."""

    def whole(self, answer: Answer) -> dict[str, Any]: ...

    def chunk(self, piece: Piece) -> dict[str, Any]: ...

    def last_chunks(self, answer: Answer) -> list[dict[str, Any]]: ...


async def respond(request: Request, generation: Generation, shape: Shape) -> Response:
    """The whole answer, or a stream of it. Raises what `Service.generate` raises, and ClientGone."""
    if not generation.streamed:
        return JSONResponse(shape.whole(await unless_disconnected(request.receive, generation.run())))
    work = asyncio.ensure_future(generation.run())
    work.add_done_callback(lambda _: generation.pieces.put_nowait(None))
    try:
        # The status line is not sent before the first token, so that a refusal is a status and not an event.
        first = await unless_disconnected(request.receive, generation.pieces.get())
        if first is None:
            work.result()
    except BaseException:
        await _stop(work)
        raise
    return EventStream(generation, shape, first, work)


class EventStream(Response):
    """Server-sent events of one generation, which is stopped when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, shape: Shape, first: Piece | None, work: asyncio.Future[Answer]) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._pieces, self._shape, self._first, self._work = generation.pieces, shape, first, work

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
        piece = self._first
        while piece is not None:
            yield json.dumps(self._shape.chunk(piece))
            piece = await self._pieces.get()
        try:
            answer = self._work.result()
        except Exception as error:
            yield _error_event(error)
            return
        for chunk in self._shape.last_chunks(answer):
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
