"""The sidecar as stitch's side sees it, through a client written from the described format: routes, fields, refusals.

Trainers talk to such a port with SGLang's request bodies and read SGLang's answers with versions stamped on. Format:
`POST /generate` answers `text`, `output_ids` and `meta_info` with `weight_version` (a string), `_start` and `_end`; the
OpenAI routes answer `weight_version_start/end` at the top; `/server_info` names versions `<run_id>/weight_v000007`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from sprawl.rollout.blocked import BLOCKED
from sprawl.rollout.fake import FakeEngine
from tests.rollout.support import RUN, Stack
from tests.rollout.test_openai import TEMPLATE, Speller
from tests.rollout.test_sidecar import with_client

STATES = {"IDLE", "FETCHING", "STAGING", "COMMITTING", "ERROR"}


@dataclass
class Replica:
    """What a pool knows of one replica after probing it."""

    ready: bool
    run_id: str | None
    version: int | None
    state: str
    reason: str | None


class WireClient:
    """Speaks the format and nothing of ours."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def probe(self) -> Replica:
        answer = await self._http.get("/server_info")
        info = answer.json()
        applied = info["applied"]
        run_id, _, name = applied.rpartition("/") if applied else (None, "", "")
        version = int(name.removeprefix("weight_v")) if name else None
        return Replica(info["ready"], run_id, version, info["sync_state"], info["reason"])

    async def generate(self, **body: Any) -> tuple[str, list[tuple[float, int]], str, int, int]:
        """Text, (log-prob, token) pairs, finish type and the versions; raises on anything but 200."""
        answer = await self._http.post("/generate", json={"return_logprob": True, **body})
        answer.raise_for_status()
        data = answer.json()
        meta = data["meta_info"]
        assert meta["weight_version"] == str(meta["weight_version_start"])
        assert isinstance(meta["weight_version_start"], int)
        assert isinstance(meta["weight_version_end"], int)
        assert meta["completion_tokens"] == len(data["output_ids"])
        pairs = [(logprob, token) for logprob, token, _ in meta["output_token_logprobs"]]
        assert [token for _, token in pairs] == data["output_ids"]
        versions = meta["weight_version_start"], meta["weight_version_end"]
        return data["text"], pairs, meta["finish_reason"]["type"], *versions

    async def wait_until_ready(self) -> None:
        while (await self._http.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)


def test_a_rollout_as_a_trainer_asks_for_it() -> None:
    async def check(http: httpx.AsyncClient, stack: Stack) -> None:
        client = WireClient(http)
        sampling = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 8,
            "stop": ["c"],
            "stop_token_ids": [],
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        prompt = stack.service.tokenizer.encode("1+1=")
        pins = {"weight_version": {"min_version": 1, "exact_version": None}}
        text, pairs, finish, start, end = await client.generate(input_ids=prompt, sampling_params=sampling, **pins)
        assert (text, finish, start, end) == ("abc", "stop", 1, 1)
        assert [logprob for logprob, _ in pairs] == [-0.5] * 3
        short = {"max_new_tokens": 2}
        text, pairs, finish, *_ = await client.generate(text="1+1=", sampling_params=short, rid="r-7", stream=False)
        assert (text, len(pairs), finish) == ("ab", 2, "length")

    with_client(check, engine=Speller("abcd"))


def test_defaults_are_those_of_sglang() -> None:
    async def check(http: httpx.AsyncClient, stack: Stack) -> None:
        answer = (await http.post("/generate", json={"input_ids": [5]})).json()
        assert len(answer["output_ids"]) == 128
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 128}
        assert "output_token_logprobs" not in answer["meta_info"]
        assert (await http.get("/server_info")).json()["commit_mode"] == "in_place"
        near = await http.post("/generate", json={"input_ids": [5] * 4090})
        assert len(near.json()["output_ids"]) == 6  # the default yields to the context
        assert len((await http.post("/v1/completions", json={"prompt": [5]})).json()["choices"]) == 1

    with_client(check)


def test_openai_routes_carry_versions_at_the_top() -> None:
    async def check(http: httpx.AsyncClient, stack: Stack) -> None:
        messages = [{"role": "user", "content": "1"}]
        bodies = {"/v1/completions": {"prompt": "1"}, "/v1/chat/completions": {"messages": messages}}
        for route, body in bodies.items():
            pinned = {**body, "weight_version": {"exact_version": 2}}
            answer = (await http.post(route, json=pinned)).json()
            assert (answer["weight_version_start"], answer["weight_version_end"]) == (2, 2)
            assert "meta_info" not in answer

    with_client(check, engine=Speller("ok"), chat_template=TEMPLATE)


def test_what_a_pool_reads_of_a_replica() -> None:
    async def check(http: httpx.AsyncClient, stack: Stack) -> None:
        client = WireClient(http)
        await asyncio.wait_for(client.wait_until_ready(), 5)
        assert await client.probe() == Replica(True, RUN, 2, "IDLE", None)
        info = (await http.get("/server_info")).json()
        fields = {"ready", "applied", "sync_state", "reason", "run_id", "commit_mode", "active_requests", "metrics"}
        fields |= {"update_destination_ready", "update_destination_error", "terminal_error"}
        assert fields <= info.keys()
        assert info["sync_state"] in STATES
        assert info["update_destination_ready"] is True
        assert info["terminal_error"] is None
        assert isinstance(info["metrics"], dict)
        woken = await http.post("/wake")
        assert woken.status_code == 200
        assert woken.json()["applied"] == f"{RUN}/weight_v000002"
        stack.gate.close("this island is draining")
        down = await http.get("/health")
        assert (down.status_code, down.json()["ready"], down.json()["reason"]) == (
            503,
            False,
            "this island is draining",
        )
        assert (await client.probe()).reason == "this island is draining"

    async def empty(http: httpx.AsyncClient, stack: Stack) -> None:
        assert (await WireClient(http).probe()).version is None

    with_client(check, follow="eager")
    with_client(empty, versions=0, follow="eager")


def test_refusals_have_the_forms_that_clients_branch_on() -> None:
    async def check(http: httpx.AsyncClient, stack: Stack) -> None:
        late = await http.post("/generate", json={"input_ids": [5], "weight_version": {"min_version": 9}})
        assert late.status_code == 409
        assert late.json().items() >= {"type": "WeightVersionNotReady", "target_version": 9}.items()
        assert late.json()["applied"] is None or isinstance(late.json()["applied"], int)
        assert isinstance(late.json()["message"], str)
        stack.gate.close("the engine is gone")
        gone = await http.post("/v1/completions", json={"prompt": [5]})
        assert gone.status_code == 503
        assert int(gone.headers["retry-after"]) >= 1
        assert gone.json()["error"]["type"] == "EngineUnavailable"
        assert gone.json()["error"]["retryable"] is True

    with_client(check, max_wait_s=0.05)


def test_admin_routes_of_engines_are_blocked_by_name() -> None:
    async def check(http: httpx.AsyncClient, stack: Stack) -> None:
        assert isinstance(stack.engine, FakeEngine)
        for route in sorted(BLOCKED):
            for method in ("GET", "POST", "PUT", "DELETE"):
                answer = await http.request(method, f"/{route}", json={})
                assert (answer.status_code, answer.json()["error"]["type"]) == (403, "RouteBlocked"), (method, route)
        for spelled in ("/PAUSE", "/flush_cache/", "/%66lush_cache", "/v1//load_lora_adapter"):
            assert (await http.post(spelled)).status_code == 403
        for unknown in ("/", "/v1", "/docs", "/openapi.json", "/generate/x", "/v1/embeddings", "/pausex"):
            answer = await http.post(unknown)
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NoSuchRoute")
        assert not stack.engine.calls

    with_client(check, versions=0)


@pytest.mark.parametrize(
    "body",
    [
        {"sampling_params": {"top_p": 0.9}},
        {"sampling_params": {"top_p": True}},
        {"sampling_params": {"ignore_eos": True}},
        {"sampling_params": {"ignore_eos": 0}},
        {"sampling_params": {"skip_special_tokens": True}},
        {"sampling_params": {"seeds": [1], "sampling_seed": 2}},
        {"sampling_params": {"temperature": 1e999}},
        {"top_logprobs_num": 2},
        {"lora_path": "x"},
        {"extra_key": "x"},
        {"stream": "yes"},
        {"weight_version": None},
        {"weight_version": "7"},
        {"weight_version": {"min_version": True}},
        {"weight_version": {"run_id": ""}},
    ],
)
def test_what_would_be_ignored_is_refused(body: dict[str, Any]) -> None:
    async def check(http: httpx.AsyncClient, stack: Stack) -> None:
        answer = await http.post("/generate", content=json.dumps({"input_ids": [5], **body}))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "BadRequest"

    with_client(check, versions=1)
