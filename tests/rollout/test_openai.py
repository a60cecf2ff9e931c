"""The OpenAI routes: shapes that clients expect, versions on top, streams that equal the whole answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.rows import Row
from tests.rollout.support import CHARACTERS, EOS, Stack, TinyRun, go
from tests.rollout.test_sidecar import client_of, with_client

TURNS = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}a {% endif %}"


class Speller(FakeEngine):
    """Writes a text, then EOS, whatever the prompt."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._script = [*(CHARACTERS.index(c) for c in text), EOS]

    async def generate(self, input_ids: Any, params: Any, watch: Any = None) -> Any:
        self.calls.append(("generate", tuple(input_ids), params))
        rows = [Row() for _ in range(params.n)]
        assert self.version is not None
        for token in self._script:
            for index, row in enumerate(rows):
                if row.finished is None:
                    row.push(token, -0.5, self.version, [EOS, *params.stop_token_ids], params.max_new_tokens)
                    if watch is not None and watch(index, token, -0.5):
                        row.finished = "stop"
        return [row.sample() for row in rows]


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_completion_with_everything() -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        body = {
            "model": "whatever",
            "prompt": ["1+1=", "2+2="],
            "n": 2,
            "max_tokens": 20,
            "temperature": 0,
            "seed": 3,
            "logprobs": 1,
            "return_token_ids": True,
            "top_p": 1,
            "echo": False,
            "weight_version": {"exact_version": 2},
        }
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["object"] == "text_completion"
        assert (answer["weight_version_start"], answer["weight_version_end"]) == (2, 2)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        for choice in answer["choices"]:
            assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
            assert choice["logprobs"]["token_logprobs"] == [-0.5] * 4
            assert choice["token_ids"][-1] == EOS
            assert choice["weight_versions"] == [{"version": 2, "start": 0, "end": 4}]
        assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 16, "total_tokens": 24}
        assert isinstance(stack.engine, FakeEngine)
        calls = [call for call in stack.engine.calls if call[0] == "generate"]
        assert calls[0][2].seeds[0] == 3
        assert len(set(calls[0][2].seeds)) == 2

    with_client(check, engine=Speller("abc"))


@pytest.mark.parametrize(
    ("prompt", "groups"),
    [("1+", [(4, 3)]), ([4, 5], [(4, 5)]), ([[4], [5, 6]], [(4,), (5, 6)])],
)
def test_prompt_forms(prompt: Any, groups: list[tuple[int, ...]]) -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        answer = await client.post("/v1/completions", json={"prompt": prompt})
        assert len(answer.json()["choices"]) == len(groups)
        assert isinstance(stack.engine, FakeEngine)
        seen = [call[1] for call in stack.engine.calls if call[0] == "generate"]
        if isinstance(prompt, str):
            assert seen == [tuple(stack.service.tokenizer.encode(prompt))]
        else:
            assert seen == groups

    with_client(check, engine=Speller("x"))


def test_stop_strings_end_the_text_and_the_work() -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        body = {"prompt": "1", "max_tokens": 50, "stop": ["\n\n", "cd"]}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == "ab"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 4

    with_client(check, engine=Speller("abcdefgh\n\nxy"))


@pytest.mark.parametrize("stop", [None, "ef", ["h\n", "zzz"]])
def test_a_stream_adds_up_to_the_whole_answer(stop: Any) -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        body = {"prompt": ["1", "2"], "n": 2, "max_tokens": 9, "stop": stop, "return_token_ids": True, "logprobs": 0}
        whole = (await client.post("/v1/completions", json=body)).json()
        streamed = await client.post(
            "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        assert streamed.headers["content-type"].startswith("text/event-stream")
        events = events_of(streamed.text)
        assert events[-1]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
            logprobs = [x for part in parts if part["logprobs"] for x in part["logprobs"]["token_logprobs"]]
            assert logprobs == choice["logprobs"]["token_logprobs"]
            assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
            assert parts[-1]["weight_versions"] == choice["weight_versions"]
        assert events[-1]["weight_version_end"] == whole["weight_version_end"] == 2

    with_client(check, engine=Speller("abcdefgh\nij"))


def test_a_refused_stream_is_a_status_not_an_event() -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        body = {"prompt": "1", "stream": True, "weight_version": {"min_version": 9}}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 409
        assert answer.json()["type"] == "WeightVersionNotReady"

    with_client(check, max_wait_s=0.05)


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    async def scenario() -> None:
        engine = FakeEngine(token_s=0.005)
        stack = Stack(TinyRun().publish(1), engine)
        async with client_of(stack) as client:
            body = {"prompt": "1", "stream": True, "max_tokens": 2000}
            request = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await asyncio.sleep(0.2)
            await engine.close()
            answer = await request
            lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
            assert json.loads(lines[-1])["error"]["type"] == "EngineUnavailable"

    go(scenario())


def test_chat_uses_the_models_template() -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 8,
            "logprobs": True,
            "weight_version": {"min_version": 1},
        }
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert answer["object"] == "chat.completion"
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "ok"}
        assert [entry["token"] for entry in choice["logprobs"]["content"]][:2] == ["o", "k"]
        assert isinstance(stack.engine, FakeEngine)
        prompt = next(call[1] for call in stack.engine.calls if call[0] == "generate")
        assert prompt == tuple(stack.service.tokenizer.encode("user hi\na "))
        events = events_of((await client.post("/v1/chat/completions", json={**body, "stream": True})).text)
        assert events[0]["object"] == "chat.completion.chunk"
        assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "ok"

    with_client(check, engine=Speller("ok"), chat_template=TEMPLATE)


@pytest.mark.parametrize(
    ("template", "said"),
    [(None, "no chat template"), ("{{ raise_exception('roles must alternate') }}", "roles must alternate")],
)
def test_chat_without_a_usable_template_is_refused(template: str | None, said: str) -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]

    with_client(check, chat_template=template)


def test_messages_of_tools_reach_the_template() -> None:
    extras = "{{ m.get('name', '') }}{{ m.get('tool_calls', []) | length }}"
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}" + extras + "\n{% endfor %}"

    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        ]
        assert (await client.post("/v1/chat/completions", json={"messages": messages})).status_code == 200
        assert isinstance(stack.engine, FakeEngine)
        prompt = next(call[1] for call in stack.engine.calls if call[0] == "generate")
        assert prompt == tuple(stack.service.tokenizer.encode("user 1+10\nassistant 1\ntool 2add0\n"))
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        refused = await client.post("/v1/chat/completions", json={"messages": image})
        assert refused.status_code == 400

    with_client(check, engine=Speller("ok"), chat_template=template)


def test_the_default_length_yields_to_the_context() -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        answer = await client.post("/v1/completions", json={"prompt": [[5], [5] * 4090]})
        assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["length", "length"]
        assert answer.json()["usage"]["completion_tokens"] == 12
        asked = await client.post("/v1/completions", json={"prompt": [5] * 4090, "max_tokens": 16})
        assert asked.json()["error"]["field"] == "max_new_tokens"

    with_client(check)
