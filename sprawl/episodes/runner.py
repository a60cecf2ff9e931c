"""Runs episodes over the versioned client: every turn is one request, balanced, retried and checked like a group."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sprawl.episodes.record import Episode, Turn, record_turn
from sprawl.episodes.routes import Coding, Kind, request_body
from sprawl.problems import Problem, ToolProblemSet, response_text
from sprawl.rollout.client.calls import Completion, Route
from sprawl.rollout.sampling import derive_seeds
from sprawl.rollout.wire import VersionPolicy


@runtime_checkable
class Completer(Protocol):
    """The part of `RolloutClient` that episodes need; it limits its own concurrency."""

    async def complete(
        self, route: Route, body: Mapping[str, Any], policy: VersionPolicy, *, prefer: str | None = None
    ) -> Completion: ...


@dataclass(frozen=True)
class EpisodeRunner:
    """`max_new_tokens` is a turn's. `route`: see `sprawl.episodes.routes.request_body`."""

    client: Completer
    tokenizer: Coding
    problems: ToolProblemSet
    max_new_tokens: int
    temperature: float
    route: Kind = "tokens"

    async def run(self, problem: Problem, seed: int, policy: VersionPolicy) -> Episode:
        """One episode, until the policy gives an answer, its turns are used up, or it ends its text. The seed of each
        turn is derived from `seed`; the same policy version gives the same episode.

        Raises SprawlError as `RolloutClient.complete` does.
        """
        turns: list[Turn] = []
        replies: list[str] = []
        seeds = derive_seeds(seed, self.problems.max_turns)
        island: str | None = None
        for number in range(self.problems.max_turns):
            route, body = request_body(self.route, self.tokenizer, problem.prompt, turns, replies)
            asked = {
                **body,
                "max_tokens": self.max_new_tokens,
                "temperature": self.temperature,
                "seed": seeds[number],
                "stop": list(self.problems.stop),
                "return_token_ids": True,
            }
            completion = await self.client.complete(route, asked, policy, prefer=island)
            island = completion.island_id
            ids = completion.body["choices"][0]["token_ids"]
            turns.append(record_turn(completion.body, island, response_text(self.tokenizer, ids)))
            reply = self.problems.reply(problem, [turn.text for turn in turns])
            ended = ids[-1] in self.tokenizer.eos_ids and self.route == "tokens"
            if reply is None or ended or number + 1 == self.problems.max_turns:
                break
            replies.append(reply)
        reward = self.problems.score(problem, turns[-1].text)
        return Episode(problem, tuple(turns), tuple(replies), reward, seed)

    async def run_many(
        self, problems: Sequence[Problem], seeds: Sequence[Sequence[int]], policy: VersionPolicy
    ) -> list[list[Episode]]:
        """One group a problem, one episode a seed. The first that fails for good cancels the rest."""
        tasks = [
            [asyncio.ensure_future(self.run(problem, seed, policy)) for seed in of_problem]
            for problem, of_problem in zip(problems, seeds, strict=True)
        ]
        every = [task for group in tasks for task in group]
        try:
            await asyncio.gather(*every)
            return [[task.result() for task in group] for group in tasks]
        finally:
            for task in every:
                task.cancel()
            await asyncio.gather(*every, return_exceptions=True)
