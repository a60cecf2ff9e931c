"""The sidecar's routes and refusals, through ASGI: no sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sprawl.rollout import http
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.refusals import Busy
from sprawl.rollout.sidecar import build_app
from sprawl.rollout.wire import GenerateResponse, ServerInfo
from tests.rollout.support import RUN, Stack, TinyRun, go, until

Check = Callable[[httpx.AsyncClient, Stack], Awaitable[None]]


@asynccontextmanager
async def client_of(stack: Stack, token: str | None = None, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(stack.service, token=token))
    async with stack, httpx.AsyncClient(transport=transport, base_url="http://island", **options) as client:
        yield client


def with_client(check: Check, versions: int = 3, engine: FakeEngine | None = None, **options: Any) -> None:
    async def scenario() -> None:
        stack = Stack(TinyRun().publish(versions), engine or FakeEngine(), **options)
        async with client_of(stack) as client:
            await check(client, stack)

    go(scenario())


def test_generate_answers_with_tokens_spans_and_versions() -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        body = {
            "text": "1+1=",
            "sampling_params": {"n": 2, "max_new_tokens": 3, "seeds": [1, 2]},
            "weight_version": {"exact_version": 1},
        }
        answer = GenerateResponse.model_validate((await client.post("/generate", json=body)).json())
        assert (answer.weight_version_start, answer.weight_version_end, answer.island_id) == (1, 1, "island-0")
        assert [sample.token_ids for sample in answer.samples] == [[1, 1, 1]] * 2
        assert answer.samples[0].spans[0].model_dump() == {"version": 1, "start": 0, "end": 3}
        assert isinstance(stack.engine, FakeEngine)
        prompt = next(call[1] for call in stack.engine.calls if call[0] == "generate")
        assert prompt == tuple(stack.service.tokenizer.encode("1+1="))

    with_client(check)


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/generate", {"input_ids": [1], "weight_version": {"min_versio": 3}}, "weight_version.min_versio"),
        ("/generate", {"input_ids": [1], "weight_version": {"min_version": "3"}}, "weight_version.min_version"),
        ("/generate", {"input_ids": [1], "weight_version": {"min_version": 3.0}}, "weight_version.min_version"),
        ("/generate", {"input_ids": [1], "weight_version": {"min_version": -1}}, "weight_version.min_version"),
        ("/generate", {"input_ids": [1], "weight_version": {"min_version": 4, "exact_version": 4}}, "weight_version"),
        ("/generate", {"input_ids": [1], "weight_version": {"min_version": 4, "max_version": 3}}, "weight_version"),
        ("/generate", {"input_ids": [1], "sampling_params": {"temperature": "1"}}, "sampling_params.temperature"),
        ("/generate", {"input_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ("/generate", {"input_ids": [1], "sampling_params": {"n": 2, "seeds": [1]}}, "sampling_params"),
        ("/generate", {"input_ids": [1], "samples": 3}, "samples"),
        ("/generate", {"input_ids": []}, "body"),
        ("/generate", {"input_ids": [True]}, "input_ids.0"),
        ("/generate", {"input_ids": [5000]}, "input_ids"),
        ("/generate", {"input_ids": [-1]}, "input_ids"),
        ("/generate", {"text": ""}, "input_ids"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 5000}}, "max_new_tokens"),
        ("/generate", [], "body"),
        ("/generate", b"{", "body"),
        ("/generate", b"\xff\xfe", "body"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": "1", "logprobs": 5}, "logprobs"),
        ("/v1/completions", {"prompt": "1", "top_p": 0.9}, "body"),
        ("/v1/completions", {"prompt": "1", "weight_version": 3}, "weight_version"),
        ("/v1/completions", {"prompt": "1", "stop": 3}, "stop.str"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "messages"),
    ],
)
def test_what_is_wrong_is_refused_by_name(route: str, body: Any, field: str) -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await client.post(route, content=content)
        assert answer.status_code == 400
        assert answer.json()["error"]["field"] == field
        assert answer.json()["error"]["message"]
        assert isinstance(stack.engine, FakeEngine)
        assert not any(call[0] == "generate" for call in stack.engine.calls)

    with_client(check)


ROUTES = {
    "/generate": {"input_ids": [1]},
    "/v1/completions": {"prompt": [1]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "1"}]},
}


@pytest.mark.parametrize("route", ROUTES)
def test_policies_fail_closed_on_every_route(route: str) -> None:
    wrong: list[tuple[Any, str]] = [
        ([], "weight_version"),
        ({"minimum": 1}, "weight_version.minimum"),
        ({"min_version": 3, "max_version": 2}, "weight_version"),
        ({"exact_version": 2, "max_version": 2}, "weight_version"),
        ({"run_id": 7}, "weight_version.run_id"),
    ]
    for name in ("min_version", "max_version", "exact_version"):
        wrong += [({name: value}, f"weight_version.{name}") for value in (-1, True, False, 1.0, 1.5, "1", [1], {})]

    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        for policy, field in wrong:
            for stream in (False, True):
                body = {**ROUTES[route], "stream": stream, "weight_version": policy}
                answer = await client.post(route, json=body)
                assert (answer.status_code, answer.json()["error"]["field"]) == (400, field), policy
        assert isinstance(stack.engine, FakeEngine)
        assert not stack.engine.calls

    with_client(check)


def test_version_refusals_are_flat_409s() -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        async def ask(**policy: int) -> httpx.Response:
            return await client.post("/generate", json={"input_ids": [5], "weight_version": policy})

        assert (await ask(min_version=2)).status_code == 200
        late = await ask(min_version=9)
        assert late.status_code == 409
        assert late.json() == {
            "type": "WeightVersionNotReady",
            "target_version": 9,
            "applied": 2,
            "message": "version 9 did not arrive in time: this island serves version 2",
            "retryable": True,
        }
        for passed in (await ask(exact_version=1), await ask(max_version=1)):
            assert (passed.status_code, passed.json()["retryable"], passed.json()["applied"]) == (409, False, 2)

    with_client(check, max_wait_s=0.2)


def test_nothing_in_service_is_a_503_with_retry_after() -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        answer = await client.post("/generate", json={"input_ids": [5]})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "EngineUnavailable"
        assert answer.json()["error"]["retryable"] is True

    with_client(check, versions=0, max_wait_s=0.05)


def test_health_follows_what_the_island_can_do() -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        await until(lambda: stack.gate.version == 2)
        assert (await client.get("/health")).json() == {"status": "ok", "ready": True, "applied": 2}
        stack.gate.close("this island is draining")
        answer = await client.get("/health")
        assert answer.status_code == 503
        assert "draining" in answer.json()["error"]["message"]
        assert (await client.post("/generate", json={"input_ids": [5]})).status_code == 503

    async def empty(client: httpx.AsyncClient, stack: Stack) -> None:
        assert (await client.get("/health")).status_code == (503 if stack.follow == "eager" else 200)

    with_client(check, follow="eager")
    with_client(empty, versions=0, follow="eager")
    with_client(empty, versions=0, follow="demand")


def test_information_routes() -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        await client.post("/generate", json={"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}})
        await client.post("/generate", json={"input_ids": [5], "bad": 1})
        info = ServerInfo.model_validate((await client.get("/server_info")).json())
        assert (info.applied, info.applied_version) == (f"{RUN}/weight_v000002", 2)
        assert (info.versions_verified, info.run_id, info.sync_state) == (1, RUN, "IDLE")
        metrics = (await client.get("/metrics")).text.splitlines()
        for line in (
            "sprawl_version_applied 2",
            "sprawl_generated_tokens_total 4",
            "sprawl_prompt_tokens_total 2",
            'sprawl_requests_total{route="/generate",status="200"} 1',
            'sprawl_requests_total{route="/generate",status="400"} 1',
        ):
            assert line in metrics
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == RUN
        assert (await client.post("/wake")).status_code == 200
        missing = await client.get("/updates")
        assert missing.status_code == 404
        assert "POST /generate" in missing.json()["error"]["message"]
        assert (await client.get("/generate")).status_code == 405

    with_client(check)


def test_wake_cuts_the_nap_short() -> None:
    async def scenario() -> None:
        run = TinyRun().publish(1)
        stack = Stack(run, FakeEngine(), follow="eager")
        stack.reconciler._poll_s = 60.0
        async with client_of(stack) as client:
            await until(lambda: stack.gate.version == 0)
            await asyncio.sleep(0.1)  # until it naps
            run.publish()
            await asyncio.sleep(0.1)
            assert stack.gate.version == 0
            await client.post("/wake")
            await until(lambda: stack.gate.version == 1)

    go(scenario())


def test_a_body_over_the_limit_is_a_413(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        big = await client.post("/generate", content=b" " * (http.MAX_BODY_BYTES + 1))
        assert big.status_code == 413

        async def endless() -> AsyncIterator[bytes]:
            sent = 0
            while True:
                assert sent <= http.MAX_BODY_BYTES + (2 << 20), "read on past the limit"
                sent += 1 << 20
                yield b" " * (1 << 20)

        streamed = await client.post("/generate", content=endless())
        assert streamed.status_code == 413

    with_client(check)


def test_bodies_are_bounded_together_and_in_time() -> None:
    async def scenario() -> None:
        inside = asyncio.Event()
        leave = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive()).get("more_body"):
                pass
            inside.set()
            await leave.wait()

        intake = http.Intake(app, each=100, together=150, seconds=0.1)
        scope = {"type": "http", "headers": []}

        def body_of(size: int) -> Callable[[], Awaitable[dict[str, Any]]]:
            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": bytes(size), "more_body": False}

            return receive

        async def dribble() -> dict[str, Any]:
            await asyncio.sleep(0.02)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def send(message: Any) -> None:
            raise AssertionError("nothing is answered here")

        first = asyncio.ensure_future(intake(scope, body_of(100), send))
        await inside.wait()
        with pytest.raises(Busy):
            await intake(scope, body_of(60), send)
        with pytest.raises(http.TooLarge):
            await intake(scope, body_of(101), send)
        with pytest.raises(http.TooLarge):
            await intake({**scope, "headers": [(b"content-length", b"101")]}, dribble, send)
        with pytest.raises(http.TooSlow):
            await intake(scope, dribble, send)
        assert http.response_of(http.TooSlow("late")).status_code == 408
        leave.set()
        await first
        await intake(scope, body_of(100), send)
        assert intake.held == 0

    go(scenario())


def test_a_token_is_required_where_there_is_one() -> None:
    async def scenario() -> None:
        stack = Stack(TinyRun().publish(1))
        async with client_of(stack, token="sesame") as client:
            for headers in ({}, {"Authorization": "Bearer open"}, {"Authorization": "sesame"}):
                for route in ("/generate", "/v1/completions", "/wake"):
                    answer = await client.post(route, json={"input_ids": [5]}, headers=headers)
                    assert answer.status_code == 401
                    assert answer.headers["www-authenticate"] == "Bearer"
                assert (await client.get("/server_info", headers=headers)).status_code == 401
                assert (await client.get("/health", headers=headers)).status_code == 200
            good = await client.post("/generate", json={"input_ids": [5]}, headers={"Authorization": "Bearer sesame"})
            assert good.status_code == 200

    go(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_client_that_leaves_stops_its_generation(route: str, stream: bool) -> None:
    async def scenario() -> None:
        engine = FakeEngine(token_s=0.01)
        stack = Stack(TinyRun().publish(1), engine, chat_template="{{ messages[0].content }}")
        app = build_app(stack.service)
        sent: list[dict[str, Any]] = []
        gone = asyncio.Event()
        many = {"sampling_params": {"max_new_tokens": 4000}} if route == "/generate" else {"max_tokens": 4000}
        body = json.dumps({**ROUTES[route], **many, "stream": stream}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": route, "headers": [], "query_string": b"", "root_path": ""}
        async with stack:
            request = asyncio.ensure_future(app(scope, receive, send))
            await until(lambda: engine.active == 1 and (not stream or len(sent) > 2))
            gone.set()
            await asyncio.wait_for(request, 2)
            assert (engine.cancelled, engine.active, stack.gate.active, stack.service.held) == (1, 0, 0, 0)
            assert stack.service.counters.cancelled == 1
            assert stream or stack.service.counters.requests == {(route, 499): 1}
            assert stream or sent[0]["status"] == 499

    go(scenario())


def test_an_unexpected_error_is_a_500_that_hides_its_details() -> None:
    class Broken(FakeEngine):
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError("secret")

    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        answer = await client.post("/generate", json={"input_ids": [5]})
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert stack.gate.active == 0

    with_client(check, engine=Broken())


def test_every_metric_is_well_formed_and_documented() -> None:
    documented = set(re.findall(r"`(sprawl_[a-z_]+)`", Path("docs/operations.md").read_text()))

    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        stack.service.island_id = 'a "b"\\\n'
        await client.post("/generate", json={"input_ids": [5]})
        await client.post("/pause")
        await client.post("/nothing")
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        kinds: dict[str, str] = {}
        for line in answer.text.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kinds[name] = line.split()
            elif not line.startswith("#"):
                row = re.fullmatch(r'([a-z_]+)(\{[a-z_]+="[^\n]*"\})? ([0-9.e+-]+)', line)
                assert row, line
                name = row[1]
                if name not in kinds:
                    name = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
                    assert kinds[name] == "histogram"
                assert (kinds[name] == "counter") == name.endswith("_total")
        assert set(kinds) | {"sprawl_engine_queued_groups"} == documented
        text = answer.text.splitlines()
        assert 'sprawl_requests_total{route="(blocked)",status="403"} 1' in text
        assert 'sprawl_request_seconds_bucket{route="/generate",le="+Inf"} 1' in text
        assert any(r'island_id="a \"b\"\\\n"' in line for line in text)

    with_client(check)
