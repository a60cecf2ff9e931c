"""A plain `openai` client against a sidecar in its own process: one extra field in the body makes it version-aware."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from sprawl.episodes import Episode, Turn, record_turn, trajectory
from sprawl.problems import Problem
from sprawl.rollout.trajectories import batch_of, from_bytes, to_bytes
from tests.rollout.processes import DiskRun, command, process, wait_for
from tests.rollout.support import RUN, character_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role[0] }} {{ m.content }}\n{% endfor %}a "
WANTED = {"weight_version": {"min_version": 1}, "return_token_ids": True}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("openai")
    run = DiskRun(place / "runs", chat_template=TEMPLATE)
    for _ in range(2):
        run.publish()
    log = place / "log"
    with process(command(run, "--island-id", "east"), log):
        found = wait_for(lambda: [r for r in run.ledger.islands() if r.state == "ready" and r.applied == 1], log)
        yield found[0].url


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


MESSAGES: list[Any] = [{"role": "user", "content": "12+34="}]


@pytest.mark.slow
def test_chat_answers_carry_versions_tokens_and_log_probs(url: str) -> None:
    answer, again = (
        client(url).chat.completions.create(
            model="policy", messages=MESSAGES, max_tokens=6, seed=3, logprobs=True, extra_body=WANTED
        )
        for _ in range(2)
    )
    assert answer.choices == again.choices
    assert answer.model_extra is not None
    assert (answer.model_extra["weight_version_start"], answer.model_extra["weight_version_end"]) == (1, 1)
    turn = record_turn(answer.model_dump(), "east")
    tokenizer = character_tokenizer()
    assert tokenizer.decode(list(turn.prompt_ids)) == "u 12+34=\na "
    assert 1 <= len(turn.token_ids) == len(turn.logprobs) <= 6
    assert [(span.version, span.start, span.end) for span in turn.spans] == [(1, 0, len(turn.token_ids))]


@pytest.mark.slow
def test_a_stream_names_the_version_of_every_token(url: str) -> None:
    chunks = list(
        client(url).chat.completions.create(
            model="policy", messages=MESSAGES, max_tokens=6, seed=3, logprobs=True, stream=True, extra_body=WANTED
        )
    )
    spans = [chunk.choices[0].model_extra["weight_versions"] for chunk in chunks if chunk.choices]  # type: ignore[index]
    assert all(span["version"] == 1 for given in spans for span in given or [])
    assert spans[-1][-1]["end"] == sum(len(given or []) for given in spans[:-1])
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["weight_version_end"] == 1


@pytest.mark.slow
def test_what_cannot_be_served_is_an_error_of_the_client_library(url: str) -> None:
    with pytest.raises(openai.ConflictError) as behind:
        client(url).chat.completions.create(
            model="policy", messages=MESSAGES, extra_body={"weight_version": {"exact_version": 0}}
        )
    assert behind.value.body is not None
    assert "already passed" in str(behind.value)
    with pytest.raises(openai.BadRequestError, match="weight_version"):
        client(url).chat.completions.create(
            model="policy", messages=MESSAGES, extra_body={"weight_version": {"newest": True}}
        )


SPECIAL = {0, 1}  # they have no text, so a template could not say them again


def ask(url: str, messages: list[Any], seed: int) -> Turn:
    answer = client(url).chat.completions.create(
        model="policy", messages=messages, max_tokens=5, seed=seed, logprobs=True, extra_body=WANTED
    )
    return record_turn(answer.model_dump(), "east")


@pytest.mark.slow
def test_an_episode_by_hand_becomes_a_row_to_train_on(url: str) -> None:
    """The conversation of somebody who has only the `openai` package; tools are answered between the turns."""
    messages = list(MESSAGES)
    turns: list[Turn] = []
    replies = ["46", "no"]
    for number in range(3):
        answers = (ask(url, messages, seed) for seed in range(50))
        turn = next(turn for turn in answers if SPECIAL.isdisjoint(turn.token_ids))
        turns.append(turn)
        if number < 2:
            messages.append({"role": "assistant", "content": turn.text})
            messages.append({"role": "tool", "tool_call_id": "1", "content": replies[number]})
    row = trajectory(Episode(Problem(0, "12+34=", "46", {}), tuple(turns), tuple(replies), 1.0, 0), group=0)
    batch = from_bytes(to_bytes(batch_of(1, [row], ["east"])), "here")
    text = character_tokenizer().decode(batch.tokens[0].tolist())
    assert text.startswith("u 12+34=\na ")
    assert "\nt 46\na " in text
    assert batch.response_tokens == sum(len(turn.token_ids) for turn in turns)
    assert batch.loss_mask is not None


@pytest.mark.slow
def test_the_run_is_listed_as_a_model(url: str) -> None:
    assert [model.id for model in client(url).models.list()] == [RUN]
    assert httpx.get(f"{url}/health", timeout=10).status_code == 200
