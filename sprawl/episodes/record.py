"""What an episode leaves: every turn with the tokens the policy read and sampled, and one row to train on. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sprawl.errors import SprawlError
from sprawl.problems import Problem
from sprawl.rollout.client.checks import logprobs_of
from sprawl.rollout.trajectories import Span, Trajectory


@dataclass(frozen=True)
class Turn:
    """One turn of the policy. `prompt_ids` is all it read, the turns before included; `spans` count from the first of
    `token_ids`; `logprobs` in nats at the sampling temperature."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    finish: Literal["stop", "length"]
    text: str


@dataclass(frozen=True)
class Episode:
    """All turns on one problem. `replies[i]` is what the tool said after turn i; the last turn has none."""

    problem: Problem
    turns: tuple[Turn, ...]
    replies: tuple[str, ...]
    reward: float
    seed: int

    @property
    def islands(self) -> tuple[str, ...]:
        """Islands in the order they served turns."""
        return tuple(span.island for turn in self.turns for span in turn.spans)


def record_turn(body: Mapping[str, Any], island: str, text: str | None = None) -> Turn:
    """A turn from the body of a /v1/chat/completions or /v1/completions answer that was asked for with
    `return_token_ids` and `logprobs`; a plain OpenAI client's `response.model_dump()` will do. `text` replaces the
    answer's own, which lacks the stop string. Raises SprawlError when the body does not carry what a record needs."""
    try:
        choice = body["choices"][0]
        given = choice.get("text") if "text" in choice else choice["message"]["content"]
        logprobs = logprobs_of(choice)
        spans = tuple(Span(s["version"], s["start"], s["end"], island) for s in choice["weight_versions"])
        turn = Turn(
            prompt_ids=tuple(choice["prompt_token_ids"]),
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(logprobs),
            spans=spans,
            finish="length" if choice["finish_reason"] == "length" else "stop",
            text=given if text is None else text,
        )
    except (KeyError, IndexError, TypeError) as error:
        raise SprawlError(
            f"the answer cannot be recorded: it lacks {error}",
            "ask with return_token_ids: true and logprobs, against a sidecar of this project",
        ) from None
    if len(turn.logprobs) != len(turn.token_ids):
        raise SprawlError("the answer carries no log-probs of its tokens", "ask with logprobs")
    return turn


def trajectory(episode: Episode, *, group: int) -> Trajectory:
    """The episode as one row: the first turn's prompt, then everything that followed. Trained on is what the policy
    sampled; what the tool said, and what a chat template put around it, is only read.

    Raises SprawlError when a turn's prompt does not begin with all that came before: the template or the tokenizer
    rewrote what the policy had sampled, and no single row is what it saw.
    """
    first = episode.turns[0]
    sequence = list(first.prompt_ids)
    start = len(sequence)
    logprobs: list[float] = []
    mask: list[bool] = []
    spans: list[Span] = []
    for number, turn in enumerate(episode.turns):
        if list(turn.prompt_ids[: len(sequence)]) != sequence:
            raise SprawlError(
                f"turn {number + 1} of problem {episode.problem.index} does not go on with the tokens of the turn "
                "before: the chat template or the tokenizer rewrote them",
                "set rollout.episodes: tokens",
            )
        between = len(turn.prompt_ids) - len(sequence)
        logprobs += [0.0] * between
        mask += [False] * between
        offset = len(turn.prompt_ids) - start
        spans += [Span(span.version, span.start + offset, span.end + offset, span.island) for span in turn.spans]
        logprobs += turn.logprobs
        mask += [True] * len(turn.token_ids)
        sequence = [*turn.prompt_ids, *turn.token_ids]
    return Trajectory(
        prompt=first.prompt_ids,
        response=sequence[start:],
        logprobs=logprobs,
        mask=mask,
        spans=spans,
        reward=episode.reward,
        group=group,
        seed=episode.seed,
        finish=episode.turns[-1].finish,
        turns=len(episode.turns),
    )
