"""How an episode so far becomes the next request: as tokens, or as chat messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from sprawl.episodes.record import Turn
from sprawl.problems.base import Decoding
from sprawl.rollout.client.calls import Route

Kind = Literal["tokens", "chat"]


class Coding(Decoding, Protocol):
    """The part of a tokenizer that episodes need."""

    def encode(self, text: str) -> list[int]: ...


def request_body(
    kind: Kind, tokenizer: Coding, prompt: str, turns: Sequence[Turn], replies: Sequence[str]
) -> tuple[Route, dict[str, Any]]:
    """Route and body of the turn after `turns`, each of which was replied to.

    `tokens`: /v1/completions with token ids, so that the policy reads on exactly what it wrote, whatever a tokenizer
    would make of the text. `chat`: /v1/chat/completions, a tool's reply as a message of role `tool`.
    """
    if kind == "tokens":
        if not turns:
            return "/v1/completions", {"prompt": tokenizer.encode(prompt), "logprobs": 0}
        before = [*turns[-1].prompt_ids, *turns[-1].token_ids]
        return "/v1/completions", {"prompt": [*before, *tokenizer.encode(replies[-1])], "logprobs": 0}
    messages = [{"role": "user", "content": prompt}]
    for turn, reply in zip(turns, replies, strict=True):
        messages += [{"role": "assistant", "content": turn.text}, {"role": "tool", "content": reply}]
    return "/v1/chat/completions", {"messages": messages, "logprobs": True}
