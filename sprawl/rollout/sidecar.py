"""The sidecar: HTTP in front of one engine.

    POST /generate               tokens (or text) in, tokens out, one group            wire.GenerateRequest
    POST /v1/completions         OpenAI subset, streaming included
    POST /v1/chat/completions    the same with the model's chat template
    GET  /v1/models              the run this island serves
    GET  /health                 200 when requests should be sent here, else 503
    GET  /server_info            wire.ServerInfo
    POST /wake                   look at the board now
    GET  /metrics                Prometheus text

Refusals: 400 names the wrong field, 401 no token, 409 wire.NotReady, 413 body too large, 503 EngineUnavailable with
Retry-After. The engine has no other way in: nothing else is proxied.
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
from sprawl.rollout.http import BearerAuth, error_response, read_model, response_of, unless_disconnected
from sprawl.rollout.service import Service
from sprawl.rollout.wire import GenerateRequest, GenerateResponse

log = logging.getLogger(__name__)

Handler = Callable[[Request, Service], Awaitable[Response]]


def build_app(service: Service, *, token: str | None = None) -> Starlette:
    """The ASGI application of one island. With `token`, every route but /health requires it as bearer token."""
    posts: dict[str, Handler] = {
        "/generate": _generate,
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
        known = ", ".join([f"POST {path}" for path in posts] + [f"GET {path}" for path in gets])
        message = f"no {request.method} {request.url.path} here; there are {known}"
        return error_response(error.status_code, "NoSuchRoute", message)

    middleware = [Middleware(BearerAuth, token=token)] if token else []
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


async def _generate(request: Request, service: Service) -> Response:
    wanted = await read_model(request, GenerateRequest)
    prompt = wanted.input_ids if wanted.input_ids is not None else service.tokenizer.encode(wanted.text or "")
    work = service.generate([prompt], wanted.sampling_params, wanted.weight_version)
    answer = await unless_disconnected(request.receive, work)
    samples = [s.model_copy(update={"text": service.text_of(s.token_ids)}) for s in answer.groups[0]]
    response = GenerateResponse(
        samples=samples,
        weight_version_start=answer.version_start,
        weight_version_end=answer.version_end,
        island_id=service.island_id,
    )
    return Response(response.model_dump_json(), media_type="application/json")


async def _wake(request: Request, service: Service) -> Response:
    service.reconciler.wake()
    return JSONResponse({"applied": service.gate.version, "latest_seen": service.reconciler.latest_seen})


async def _health(request: Request, service: Service) -> Response:
    if service.ready:
        return JSONResponse({"status": "ok", "applied": service.gate.version})
    return error_response(503, "EngineUnavailable", service.not_ready_reason)


async def _server_info(request: Request, service: Service) -> Response:
    return JSONResponse(service.describe().model_dump())


async def _metrics(request: Request, service: Service) -> Response:
    return PlainTextResponse(metrics.render(service), media_type="text/plain; version=0.0.4")


async def _models(request: Request, service: Service) -> Response:
    model = {"id": service.run_id, "object": "model", "owned_by": "sprawl"}
    return JSONResponse({"object": "list", "data": [model]})
