"""Episodes over a real sidecar, with an engine that knows how to use a calculator."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from sprawl.episodes import Episode, EpisodeRunner, record_turn, trajectory
from sprawl.errors import SprawlError
from sprawl.evaluate import evaluate_version
from sprawl.policy import Architecture, Decoder
from sprawl.problems import Problem, ToolProblemSet, load_problem_set
from sprawl.rollout.client import Completion, RolloutClient
from sprawl.rollout.trajectories import Span, from_bytes, to_bytes
from sprawl.rollout.wire import VersionPolicy
from sprawl.run.collector import episode_batch
from sprawl.train.trainer import Trainer
from tests.episodes.speaking import TOKENIZER, SpeakingEngine, adds_step_by_step
from tests.rollout.islands import live, record
from tests.rollout.support import CHARACTERS, EOS, Stack, TinyRun, go, until
from tests.train.helpers import HF_CONFIG, make_config

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PARAMS = {"terms": 3, "digits": 1, "template": "{expression}=", "call_open": "", "result_close": " ", "max_turns": 4}
ANY = VersionPolicy(min_version=0)


def problem_set(**changes: Any) -> ToolProblemSet:
    found = load_problem_set("calculator", 7, {**PARAMS, **changes})
    assert isinstance(found, ToolProblemSet)
    return found


@asynccontextmanager
async def playing(
    speak: Any = adds_step_by_step,
    route: Any = "tokens",
    template: str | None = TEMPLATE,
    versions: int = 1,
    tokens: int = 32,
    follow: Any = "demand",
    **changes: Any,
) -> AsyncIterator[tuple[EpisodeRunner, SpeakingEngine, TinyRun]]:
    run = TinyRun().publish(versions)
    engine = SpeakingEngine(speak)
    async with live(Stack(run, engine, follow=follow, chat_template=template)) as (island,):
        records = [record(island.island_id, island.url)]
        async with RolloutClient(lambda: records, timeout_s=20) as client:
            yield EpisodeRunner(client, TOKENIZER, problem_set(**changes), tokens, 1.0, route), engine, run


QUESTION = Problem(3, "1+2+4=", "7", {})


@pytest.mark.parametrize("route", ["tokens", "chat"])
def test_every_turn_is_recorded_with_tokens_log_probs_and_versions(route: Any) -> None:
    async def scenario() -> tuple[Episode, list[str]]:
        async with playing(route=route) as (runner, engine, _):
            return await runner.run(QUESTION, 11, ANY), engine.read

    episode, read = go(scenario())
    assert [turn.text for turn in episode.turns] == ["1+2=", "3+4=", "7"]
    assert episode.replies == ("3 ", "7 ")
    assert (episode.reward, episode.seed) == (1.0, 11)
    assert read == ["1+2+4=", "1+2+4=1+2=3 ", "1+2+4=1+2=3 3+4=7 "]
    for turn, text in zip(episode.turns, read, strict=True):
        assert TOKENIZER.decode(list(turn.prompt_ids)) == text
        assert turn.logprobs == tuple(-0.25 * at for at in range(len(turn.token_ids)))
        assert turn.spans == (Span(0, 0, len(turn.token_ids), "island-0"),)

    row = trajectory(episode, group=3)
    whole = [*row.prompt, *row.response]
    assert TOKENIZER.decode(whole[:-1]) == "1+2+4=1+2=3 3+4=7 7"
    assert whole[-1] == EOS
    sampled = [token for token, mine in zip(row.response, row.mask, strict=True) if mine]
    assert TOKENIZER.decode(sampled[:-1]) == "1+2=3+4=7"
    assert [value for value, mine in zip(row.logprobs, row.mask, strict=True) if not mine] == [0.0] * 4
    assert (row.turns, row.finish, row.reward, row.group, row.seed) == (3, "stop", 1.0, 3, 11)
    assert [(span.start, span.end) for span in row.spans] == [(0, 4), (6, 10), (12, 14)]


def test_a_version_that_arrives_between_two_turns_shows_in_their_spans() -> None:
    class Publishing:
        """Before the third turn a new version comes into service."""

        def __init__(self, runner: EpisodeRunner, engine: SpeakingEngine, run: TinyRun) -> None:
            self.runner, self.engine, self.run = runner, engine, run
            self.turns = 0

        async def complete(self, *args: Any, **options: Any) -> Completion:
            self.turns += 1
            if self.turns == 3:
                self.run.publish()
                await until(lambda: self.engine.version == 1)
            return await self.runner.client.complete(*args, **options)

    async def scenario() -> Episode:
        async with playing(follow="eager") as (runner, engine, run):
            watched = dataclasses.replace(runner, client=Publishing(runner, engine, run))
            return await watched.run(QUESTION, 1, ANY)

    episode = go(scenario())
    assert [span.version for turn in episode.turns for span in turn.spans] == [0, 0, 1]
    assert [span.version for span in trajectory(episode, group=0).spans] == [0, 0, 1]
    batch = episode_batch(1, [[episode]])
    assert (batch.version_start.tolist(), batch.version_end.tolist()) == ([0], [1])


def test_an_episode_ends_with_an_answer_with_the_text_or_with_its_turns() -> None:
    async def turns(speak: Any, **changes: Any) -> Episode:
        async with playing(speak, **changes) as (runner, _, _):
            return await runner.run(QUESTION, 1, ANY)

    forever = go(turns(lambda read: "1+1=", max_turns=3))
    assert ([turn.text for turn in forever.turns], len(forever.replies), forever.reward) == (["1+1="] * 3, 2, 0.0)
    assert len(go(turns(lambda read: "9")).turns) == 1
    cut = go(turns(lambda read: "1+1=", tokens=2))
    assert (cut.turns[0].finish, cut.turns[0].text, len(cut.turns)) == ("length", "1+", 1)


def test_a_template_that_rewrites_what_was_said_is_noticed() -> None:
    async def scenario() -> Episode:
        swapped = TEMPLATE.replace("message.content", "message.content | replace('1+2', '2+1')")
        async with playing(route="chat", template=swapped) as (runner, _, _):
            return await runner.run(Problem(3, "3+2+4=", "9", {}), 1, ANY)

    def speaks(read: str) -> str:
        return "1+2="

    async def drifting() -> Episode:
        swapped = TEMPLATE.replace("message.content", "message.content | replace('1+2', '2+1')")
        async with playing(speaks, route="chat", template=swapped) as (runner, _, _):
            return await runner.run(QUESTION, 1, ANY)

    assert trajectory(go(scenario()), group=0).turns > 1  # nothing to rewrite here
    with pytest.raises(SprawlError, match=r"turn 2 of problem 3 .*rollout.episodes: tokens"):
        trajectory(go(drifting()), group=0)


def test_a_model_without_a_chat_template_says_so() -> None:
    async def scenario() -> None:
        async with playing(route="chat", template=None) as (runner, _, _):
            await runner.run(QUESTION, 1, ANY)

    with pytest.raises(SprawlError, match="no chat template"):
        go(scenario())


def test_groups_of_episodes_become_a_batch_that_can_be_trained_on() -> None:
    async def scenario() -> list[list[Episode]]:
        async with playing() as (runner, engine, _):
            problems = [runner.problems.train(index) for index in range(3)]
            engine.speak = lambda read: adds_step_by_step(read) if len(engine.read) % 3 else "5"
            return await runner.run_many(problems, [[10 * p + s for s in range(4)] for p in range(3)], ANY)

    groups = go(scenario())
    assert {len(group) for group in groups} == {4}
    batch = from_bytes(to_bytes(episode_batch(2, groups)), "here")
    assert batch.samples == 12
    assert batch.turns is not None
    assert batch.loss_mask is not None
    assert int(batch.turns.max()) > 1
    assert batch.seeds.tolist() == [10 * p + s for p in range(3) for s in range(4)]
    assert batch.response_tokens == sum(len(t.token_ids) for group in groups for e in group for t in e.turns)

    arch = Architecture.from_hf({**HF_CONFIG, "vocab_size": len(CHARACTERS)})
    torch.manual_seed(0)
    trainer = Trainer(Decoder(arch), Decoder(arch), make_config(boundary={"codec": "dense"}))
    before = [parameter.detach().clone() for parameter in trainer.decoder.parameters()]
    stats = trainer.step(2, batch, None)
    assert stats.applied
    assert 0.0 < float(batch.rewards.mean()) < 1.0
    assert any(not torch.equal(one, other) for one, other in zip(before, trainer.decoder.parameters(), strict=True))


def test_evaluation_plays_episodes_at_the_exact_version() -> None:
    async def scenario() -> Any:
        async with playing(versions=2) as (runner, engine, _):
            wrong = runner.problems.heldout(6)[0].prompt
            engine.speak = lambda read: "0" if read == wrong else adds_step_by_step(read)
            return await evaluate_version(
                runner.client,  # type: ignore[arg-type]
                TOKENIZER,
                runner.problems,
                version=1,
                step=1,
                limit=6,
                max_new_tokens=32,
                stop_token_ids=[],
            )

    result = go(scenario())
    assert (result.problems, result.correct, result.version) == (6, 5, 1)
    right = next(row for row in result.examples if row["score"] == 1.0)
    assert right["response"].endswith(" " + right["answer"])  # what the tool said is shown too


@pytest.mark.parametrize("missing", ["prompt_token_ids", "token_ids", "weight_versions", "logprobs"])
def test_an_answer_without_what_a_record_needs_is_refused(missing: str) -> None:
    choice: dict[str, Any] = {
        "text": "7",
        "finish_reason": "stop",
        "prompt_token_ids": [1],
        "token_ids": [2],
        "weight_versions": [{"version": 1, "start": 0, "end": 1}],
        "logprobs": {"token_logprobs": [-0.5]},
    }
    assert record_turn({"choices": [choice]}, "a").logprobs == (-0.5,)
    del choice[missing]
    with pytest.raises(SprawlError, match="ask with"):
        record_turn({"choices": [choice]}, "a")
