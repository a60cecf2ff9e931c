"""The sidecar: HTTP in front of one engine.

    POST /generate               tokens (or text) in, tokens out, one group            generate.GenerateBody
    POST /v1/completions         OpenAI subset                                         openai_types.CompletionRequest
    POST /v1/chat/completions    the same with the model's chat template               openai_types.ChatRequest
    GET  /v1/models              the run this island serves
    GET  /health                 200 when requests should be sent here, else 503
    GET  /server_info            wire.ServerInfo
    POST /wake                   look at the board now
    GET  /metrics                Prometheus text

All three generating routes stream (`"stream": true`, server-sent events). Refusals: 400 names the wrong field, 401 no
token, 403 an admin route of an engine, 404, 408 the body came too slowly, 409 wire.NotReady, 413 the body is too large,
499 the client left, 503 EngineUnavailable with Retry-After. The engine has no other way in: nothing is proxied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sprawl.rollout import metrics, openai
from sprawl.rollout.blocked import is_blocked
from sprawl.rollout.generate import generate
from sprawl.rollout.http import BearerAuth, Intake, error_response, response_of
from sprawl.rollout.service import Service

log = logging.getLogger(__name__)

Handler = Callable[[Request, Service], Awaitable[Response]]


def build_app(service: Service, *, token: str | None = None) -> Starlette:
    """The ASGI application of one island. With `token`, every route but /health requires it as bearer token."""
    posts: dict[str, Handler] = {
        "/generate": generate,
        "/v1/completions": openai.completions,
        "/v1/chat/completions": openai.chat_completions,
        "/wake": _wake,
    }
    gets: dict[str, Handler] = {
        "/health": _health,
        "/server_info": _server_info,
        "/metrics": _metrics,
        "/v1/models": _models,
    }
    routes = [Route(path, _endpoint(service, path, handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, _endpoint(service, path, handler), methods=["GET"]) for path, handler in gets.items()]

    async def no_such_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if is_blocked(path):
            service.counters.count("(blocked)", 403, 0.0)
            return error_response(403, "RouteBlocked", f"{path} of the engine is managed by the sidecar")
        service.counters.count("(unknown)", error.status_code, 0.0)
        known = ", ".join([f"POST {path}" for path in posts] + [f"GET {path}" for path in gets])
        message = f"no {request.method} {path} here; there are {known}"
        return error_response(error.status_code, "NoSuchRoute", message)

    middleware = [Middleware(BearerAuth, token=token)] if token else []
    middleware.append(Middleware(Intake))
    handlers = {404: no_such_route, 405: no_such_route}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


def _endpoint(service: Service, route: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def run(request: Request) -> Response:
        started = time.monotonic()
        try:
            response = await handler(request, service)
        except Exception as error:
            try:
                response = response_of(error)
            except Exception:
                log.exception("%s failed", route)
                response = error_response(500, "InternalError", f"{type(error).__name__}; see the island's log")
        service.counters.count(route, response.status_code, time.monotonic() - started)
        return response

    return run


async def _wake(request: Request, service: Service) -> Response:
    service.reconciler.wake()
    return JSONResponse(service.describe().model_dump())


async def _health(request: Request, service: Service) -> Response:
    if service.ready:
        return JSONResponse({"status": "ok", "ready": True, "applied": service.gate.version})
    reason = service.not_ready_reason
    return error_response(503, "EngineUnavailable", reason, beside={"ready": False, "reason": reason})


async def _server_info(request: Request, service: Service) -> Response:
    return JSONResponse(service.describe().model_dump())


async def _metrics(request: Request, service: Service) -> Response:
    return PlainTextResponse(metrics.render(service), media_type="text/plain; version=0.0.4")


async def _models(request: Request, service: Service) -> Response:
    model = {"id": service.served_run, "object": "model", "owned_by": "sprawl"}
    return JSONResponse({"object": "list", "data": [model]})
