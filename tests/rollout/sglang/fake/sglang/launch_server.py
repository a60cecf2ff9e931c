"""A real HTTP server that behaves as SGLang's source says, without a model: tokens are a function of the checkpoint's
bytes, the prompt, the seed and the position.

What it imitates, in github.com/sgl-project/sglang:
- routes, status codes, the key, health while starting, the context length of /v1/models:
  python/sglang/srt/entrypoints/http_server.py at 0025436eab05
- fields of requests: python/sglang/srt/managers/io_struct.py at 001067fffe33
- sampling parameters: python/sglang/srt/sampling/sampling_params.py at 00c17cafcb9e
- version spans, sent only with the end of a request: python/sglang/srt/utils/weight_versions.py at 19f93835d3f8
- pause modes and the update from disk: docs/advanced_features/sglang_for_rl.md at 067bfe93626b
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

TOKEN_S = 0.002
START_S = 0.1
FIELDS = {"rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "extra_key", "stream"}
SAMPLING = {"max_new_tokens", "temperature", "sampling_seed", "stop_token_ids", "ignore_eos"}


@dataclass(eq=False)
class Running:
    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)  # version left behind, tokens it had made
    aborted: bool = False


def read_weights(model_path: str) -> tuple[bytes, bool, int]:
    """Digest of the checkpoint, whether it holds a bf16 NaN, vocabulary. Raises OSError or ValueError."""
    directory = Path(model_path)
    data = (directory / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if len(data) != 8 + size + end:
        raise ValueError("incomplete safetensors file")
    bits = np.frombuffer(data, np.uint16, offset=8 + size) if size % 2 == 0 else np.zeros(0, np.uint16)
    broken = bool(((bits & 0x7F80 == 0x7F80) & (bits & 0x7F != 0)).any())
    vocab = json.loads((directory / "config.json").read_bytes())["vocab_size"]
    return hashlib.sha256(data).digest(), broken, vocab


class Engine:
    def __init__(self, model_path: str, version: str, deterministic: bool, spans: bool) -> None:
        self.version = version
        self.deterministic = deterministic
        self.spans = spans
        self.running: list[Running] = []
        self.going = asyncio.Event()
        self.going.set()
        self.mode: str | None = None
        self.weights, self.broken, self.vocab = read_weights(model_path)

    def sample(self, request: Running) -> None:
        greedy = request.sampling["temperature"] == 0
        seed = request.sampling["sampling_seed"] if self.deterministic and not greedy else 0
        state = (self.weights.hex(), request.prompt, request.tokens, seed)
        draw = random.Random(repr(state))
        if not self.deterministic and not greedy:
            draw = random.Random()
        request.tokens.append(draw.randrange(self.vocab))
        request.logprobs.append(None if self.broken else -draw.random())

    async def generate(self, request: Running) -> AsyncIterator[dict[str, Any]]:
        await self.going.wait()
        self.running.append(request)
        reason: dict[str, Any] | None = None
        try:
            while reason is None:
                await asyncio.sleep(TOKEN_S)
                while not self.going.is_set() and not request.aborted:
                    await asyncio.sleep(TOKEN_S)
                if request.aborted:
                    reason = {"type": "abort", "message": "Aborted"}
                else:
                    self.sample(request)
                    token = request.tokens[-1]
                    if token in request.sampling.get("stop_token_ids", ()):
                        reason = {"type": "stop", "matched": token}
                    elif len(request.tokens) >= request.sampling["max_new_tokens"]:
                        reason = {"type": "length", "length": len(request.tokens)}
                yield self.answer(request, reason)
        finally:
            self.running.remove(request)

    def answer(self, request: Running, reason: dict[str, Any] | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.tokens),
            "weight_version": self.version,
            "input_token_logprobs": [],
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(request.logprobs, request.tokens, strict=True)
            ],
        }
        if reason is not None and self.spans:
            spans: list[dict[str, Any]] = []
            for version, end in [*request.changes, (self.version, len(request.tokens))]:
                start = spans[-1]["end"] if spans else 0
                if end > start or not spans:
                    spans.append({"version": version, "start": start, "end": end})
            meta["weight_versions"] = spans
        return {"text": "", "output_ids": list(request.tokens), "meta_info": meta}

    async def pause(self, mode: str) -> None:
        self.going.clear()
        self.mode = mode
        while mode == "abort" and self.running:
            for request in self.running:
                request.aborted = True
            await asyncio.sleep(TOKEN_S)

    def resume(self) -> None:
        self.mode = None
        self.going.set()

    async def update(self, body: dict[str, Any]) -> tuple[bool, str]:
        while self.mode is None and self.running:  # the writer's lock waits for all requests
            await asyncio.sleep(TOKEN_S)
        try:
            weights, broken, vocab = read_weights(body["model_path"])
        except (OSError, ValueError) as error:
            return False, f"Failed to update weights: {error}. Rolling back to original weights."
        if body.get("flush_cache", True) and self.mode == "in_place" and self.running:
            os._exit(1)  # "Cache flush failed after updating weights": an assertion that ends the scheduler
        self.weights, self.broken, self.vocab = weights, broken, vocab
        if body.get("weight_version") is not None:
            for request in self.running:
                if request.tokens:
                    request.changes.append((self.version, len(request.tokens)))
            self.version = body["weight_version"]
        return True, "Succeeded to update model weights."


def build(arguments: argparse.Namespace) -> Any:
    engine = Engine(
        arguments.model_path,
        arguments.weight_version,
        arguments.enable_deterministic_inference,
        os.environ.get("FAKE_SGLANG_SPANS", "1") == "1",
    )
    ready_at = asyncio.get_running_loop().time() + START_S

    async def health(request: Request) -> Response:
        if asyncio.get_running_loop().time() < ready_at:
            return Response(status_code=503)
        if os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "1") != "0":
            try:  # it generates a token, and a paused server does not
                await asyncio.wait_for(engine.going.wait(), 20)
            except TimeoutError:
                return Response(status_code=503)
        return Response(status_code=200)

    async def generate(request: Request) -> Response:
        body = await request.json()
        sampling = body.get("sampling_params", {})
        unknown = (body.keys() - FIELDS) | (sampling.keys() - SAMPLING)
        if unknown:
            return JSONResponse({"error": {"message": f"unexpected {sorted(unknown)}"}}, 400)
        if not all(0 <= token < engine.vocab for token in body["input_ids"]):
            return JSONResponse({"error": {"message": "token id out of range"}}, 400)
        running = Running(body["rid"], body["input_ids"], sampling)
        if body.get("stream"):

            async def events() -> AsyncIterator[bytes]:
                async for out in engine.generate(running):
                    yield b"data: " + json.dumps(out).encode() + b"\n\n"
                yield b"data: [DONE]\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")
        return JSONResponse([out async for out in engine.generate(running)][-1])

    async def abort(request: Request) -> Response:
        rid = (await request.json())["rid"]
        for running in engine.running:
            if running.rid.startswith(rid):
                running.aborted = True
        return Response(status_code=200)

    async def pause(request: Request) -> Response:
        await engine.pause((await request.json()).get("mode", "abort"))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(request: Request) -> Response:
        await request.json()
        engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update(request: Request) -> Response:
        success, message = await engine.update(await request.json())
        said = {"success": success, "message": message, "num_paused_requests": len(engine.running)}
        return JSONResponse(said, 200 if success else 400)

    async def model_info(request: Request) -> Response:
        return JSONResponse({"model_path": arguments.model_path, "weight_version": engine.version})

    async def models(request: Request) -> Response:
        config = json.loads((Path(arguments.model_path) / "config.json").read_text())
        return JSONResponse({"data": [{"id": "served", "max_model_len": config["max_position_embeddings"]}]})

    async def server_info(request: Request) -> Response:
        return JSONResponse({"internal_states": [{}], "version": "fake"})

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/generate", generate, methods=["POST", "PUT"]),
            Route("/abort_request", abort, methods=["POST"]),
            Route("/pause_generation", pause, methods=["POST"]),
            Route("/continue_generation", resume, methods=["POST"]),
            Route("/update_weights_from_disk", update, methods=["POST"]),
            Route("/model_info", model_info),
            Route("/v1/models", models),
            Route("/server_info", server_info),
        ]
    )
    key = yaml.safe_load(Path(arguments.config).read_text())["api-key"]

    async def authorised(scope: Any, receive: Any, send: Any) -> None:
        checked = scope["type"] == "http" and not scope["path"].startswith("/health")
        if checked and dict(scope["headers"]).get(b"authorization") != f"Bearer {key}".encode():
            await PlainTextResponse("Unauthorized", 401)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return authorised


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("config", "model-path", "served-model-name", "host", "port", "weight-version", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--skip-tokenizer-init", action="store_true", required=True)
    parser.add_argument("--enable-deterministic-inference", action="store_true")
    arguments = parser.parse_args()

    async def serve() -> None:
        config = uvicorn.Config(build(arguments), arguments.host, int(arguments.port), log_level="warning")
        await uvicorn.Server(config).serve()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
