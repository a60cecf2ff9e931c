"""The HTTP edge, shared by all routes: reading bodies within their limits, answering errors, noticing that a client
left, and the bearer token."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sprawl.config_files import describe_validation_error
from sprawl.rollout.engine import EngineError
from sprawl.rollout.gate import GateClosed, Refused
from sprawl.rollout.refusals import BadRequest, Busy

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

MAX_BODY_BYTES = 8 << 20  # of one request
MAX_BODIES_BYTES = 64 << 20  # of all requests that are being read or answered
BODY_S = 20.0  # for a whole body
RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499


class ClientGone(Exception):
    """The client closed its connection before the answer: whatever it asked for is stopped."""


class TooLarge(Exception):
    """413: the body exceeds the limit."""


class TooSlow(Exception):
    """408: the body did not arrive in time."""


def error_response(
    status: int, kind: str, message: str, *, beside: Mapping[str, Any] | None = None, **more: Any
) -> JSONResponse:
    """`{"error": {"type", "message", ...}, **beside}`; 503 carries Retry-After and `retryable: true`."""
    headers = {}
    if status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
        more["retryable"] = True
    return JSONResponse({**(beside or {}), "error": {"type": kind, "message": message, **more}}, status, headers)


def response_of(error: Exception) -> Response:
    """The answer to a request that ended in `error`. An error that is no refusal is raised again (500)."""
    match error:
        case BadRequest():
            return error_response(400, "BadRequest", str(error), field=error.field)
        case TooLarge():
            return error_response(413, "TooLarge", str(error))
        case TooSlow():
            return error_response(408, "RequestTimeout", str(error))
        case Refused():
            return JSONResponse(error.answer.model_dump(), 409)
        case GateClosed() | Busy() | EngineError():
            return error_response(503, "EngineUnavailable", str(error))
        case ClientGone():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
    raise error


async def read_model(request: Request, model: type[M]) -> M:
    """Read and validate a JSON body, strictly: "3" is no integer, unknown keys are refused.

    Raises BadRequest (naming the field), ClientGone, and what `Intake` raises.
    """
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    try:
        return model.model_validate_json(bytes(body), strict=True)
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"]) or "body"
        raise BadRequest(field, describe_validation_error(error, model, "request")) from None


class Intake:
    """ASGI middleware: bodies are bounded in size, one by one and together, and in time, while they are read.

    Receiving raises TooLarge, TooSlow or Busy. What a request has sent counts until it is answered.
    """

    def __init__(
        self, app: ASGIApp, *, each: int = MAX_BODY_BYTES, together: int = MAX_BODIES_BYTES, seconds: float = BODY_S
    ) -> None:
        self._app, self._each, self._together, self._seconds = app, each, together, seconds
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        size = 0
        complete = False
        deadline: float | None = None

        async def bounded() -> Message:
            nonlocal size, complete, deadline
            if complete:
                return await receive()
            if deadline is None:
                deadline = asyncio.get_running_loop().time() + self._seconds
                if _declared(scope) > self._each:
                    raise TooLarge(f"the body exceeds {self._each} bytes")
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise TooSlow(f"the body did not arrive within {self._seconds:g} s") from None
            arrived = len(message.get("body", b""))
            size += arrived
            self.held += arrived
            complete = not message.get("more_body", False)
            if size > self._each:
                raise TooLarge(f"the body exceeds {self._each} bytes")
            if self.held > self._together:
                raise Busy("the requests that are being read are too large together")
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            self.held -= size


def _declared(scope: Scope) -> int:
    """Content-Length, 0 where there is none (chunked) or no number."""
    value = dict(scope["headers"]).get(b"content-length", b"")
    return int(value) if value.isdigit() else 0


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but cancel it and raise ClientGone when the client disconnects first. The body must have been
    read before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class BearerAuth:
    """ASGI middleware: every route but /health needs `Authorization: Bearer <token>`; compared in constant time."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] == "/health"):
            await self._app(scope, receive, send)
            return
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            message = "this sidecar needs 'Authorization: Bearer <token>' (its SPRAWL_TOKEN)"
            response = error_response(401, "Unauthorized", message)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
