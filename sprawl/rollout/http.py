"""The HTTP edge, shared by all routes: reading a body within its limit, answering errors, noticing that a client left,
and the bearer token."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sprawl.config import describe_validation_error
from sprawl.rollout.engine import EngineError
from sprawl.rollout.gate import GateClosed, Refused
from sprawl.rollout.refusals import BadRequest, Busy

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

MAX_BODY_BYTES = 8 << 20
RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499


class ClientGone(Exception):
    """The client closed its connection before the answer: whatever it asked for is stopped."""


class TooLarge(Exception):
    """413: the body exceeds the limit."""


def error_response(status: int, kind: str, message: str, **more: Any) -> JSONResponse:
    """`{"error": {"type", "message", ...}}`; 503 carries Retry-After and `retryable: true`."""
    headers = {}
    if status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
        more["retryable"] = True
    return JSONResponse({"error": {"type": kind, "message": message, **more}}, status, headers)


def response_of(error: Exception) -> Response:
    """The answer to a request that ended in `error`. An error that is no refusal is raised again (500)."""
    match error:
        case BadRequest():
            return error_response(400, "BadRequest", str(error), field=error.field)
        case TooLarge():
            return error_response(413, "TooLarge", str(error))
        case Refused():
            return JSONResponse(error.answer.model_dump(), 409)
        case GateClosed() | Busy() | EngineError():
            return error_response(503, "EngineUnavailable", str(error))
        case ClientGone():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
    raise error


async def read_model(request: Request, model: type[M], limit: int = MAX_BODY_BYTES) -> M:
    """Read and validate a JSON body, strictly: "3" is no integer, unknown keys are refused.

    Raises TooLarge, BadRequest (naming the field) or ClientGone.
    """
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise TooLarge(f"the body exceeds {limit} bytes")
        if not message.get("more_body", False):
            break
    try:
        return model.model_validate_json(bytes(body), strict=True)
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"]) or "body"
        raise BadRequest(field, describe_validation_error(error, model, "request")) from None


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
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                response = error_response(
                    401, "Unauthorized", "this sidecar needs 'Authorization: Bearer <token>' (its SPRAWL_TOKEN)"
                )
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
