"""/v1/completions and /v1/chat/completions over a Service, streaming included.

Every answer carries `weight_version_start` and `weight_version_end`; every choice carries `weight_versions`, the spans
of its tokens. In a stream each chunk has the span of its own token (null where the engine tells versions at the end
only), the last chunk of a choice those of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sprawl.rollout.chat import render_chat
from sprawl.rollout.http import read_model
from sprawl.rollout.openai_types import ChatRequest, CompletionRequest, OpenAIRequest, envelope
from sprawl.rollout.service import Answer, Service
from sprawl.rollout.stream import Generation, Piece, respond
from sprawl.rollout.wire import Sample


async def completions(request: Request, service: Service) -> Response:
    """POST /v1/completions."""
    wanted = await read_model(request, CompletionRequest)
    prompts = [await service.encode(p) if isinstance(p, str) else p for p in wanted.prompts]
    return await _respond(request, service, wanted, prompts, chat=False)


async def chat_completions(request: Request, service: Service) -> Response:
    """POST /v1/chat/completions."""
    wanted = await read_model(request, ChatRequest)
    messages = [message.for_template() for message in wanted.messages]
    prompt = render_chat(service.tokenizer.chat_template, service.files, messages)
    return await _respond(request, service, wanted, [await service.encode(prompt)], chat=True)


async def _respond(
    request: Request, service: Service, wanted: OpenAIRequest, prompts: Sequence[list[int]], *, chat: bool
) -> Response:
    room = service.engine.limits.max_length - max(map(len, prompts))
    generation = Generation(
        service,
        prompts,
        wanted.sampling(room),
        wanted.weight_version,
        stops=wanted.stops,
        streamed=wanted.stream,
    )
    return await respond(request, generation, Choices(wanted, generation, chat=chat))


class Choices:
    """The `Shape` of both routes."""

    def __init__(self, wanted: OpenAIRequest, generation: Generation, *, chat: bool) -> None:
        self.wanted, self.chat = wanted, chat
        self.service, self.prompts, self.cursors = generation.service, generation.prompts, generation.cursors
        kind = "chat.completion" if chat else "text_completion"
        self.head = envelope(
            kind + (".chunk" if chat and wanted.stream else ""),
            "chatcmpl" if chat else "cmpl",
            wanted.model or self.service.served_run,
        )

    # --- whole answers ---

    def whole(self, answer: Answer) -> dict[str, Any]:
        samples = [sample for group in answer.groups for sample in group]
        choices = [self._choice(index, sample) for index, sample in enumerate(samples)]
        return {**self.head, "choices": choices, "usage": self.usage(answer), **versions(answer)}

    def _choice(self, index: int, sample: Sample) -> dict[str, Any]:
        self.cursors[index].finish()
        text = self.cursors[index].text
        choice: dict[str, Any] = {"index": index, "finish_reason": sample.finish_reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(sample.token_ids, sample.logprobs)
        choice["weight_versions"] = [span.model_dump() for span in sample.spans]
        if self.wanted.return_token_ids:
            choice["token_ids"] = sample.token_ids
            choice["prompt_token_ids"] = self.prompts[index // self.wanted.n]
        return choice

    def _logprobs(self, token_ids: list[int], logprobs: list[float]) -> dict[str, Any] | None:
        if not self.wanted.wants_logprobs:
            return None
        texts = [self.service.tokenizer.decode([token]) for token in token_ids]
        if self.chat:
            pairs = zip(texts, logprobs, strict=True)
            return {
                "content": [
                    {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                    for text, value in pairs
                ]
            }
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": None}

    def usage(self, answer: Answer) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        made = sum(len(sample.token_ids) for group in answer.groups for sample in group)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    # --- chunks ---

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._chunk(
            piece.choice,
            piece.text,
            [piece.token],
            logprobs=self._logprobs([piece.token], [piece.logprob]),
            weight_versions=piece.spans,
        )

    def last_chunks(self, answer: Answer) -> list[dict[str, Any]]:
        """The held-back text, finish reason and all spans of every choice; the versions ride on all of them."""
        chunks = []
        for index, sample in enumerate(sample for group in answer.groups for sample in group):
            rest = self.cursors[index].finish()
            spans = [span.model_dump() for span in sample.spans]
            chunk = self._chunk(index, rest, [], finish_reason=sample.finish_reason, weight_versions=spans)
            chunks.append({**chunk, **versions(answer)})
        if self.wanted.stream_options is not None and self.wanted.stream_options.include_usage:
            chunks.append({**self.head, "choices": [], "usage": self.usage(answer), **versions(answer)})
        return chunks

    def _chunk(self, choice: int, text: str, token_ids: list[int], **more: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice, "finish_reason": None, "logprobs": None}
        if self.chat:
            body["delta"] = {"role": "assistant", "content": text}
        else:
            body["text"] = text
        if self.wanted.return_token_ids:
            body["token_ids"] = token_ids
        return {**self.head, "choices": [{**body, **more}]}


def versions(answer: Answer) -> dict[str, Any]:
    return {
        "weight_version_start": answer.version_start,
        "weight_version_end": answer.version_end,
        "run_id": answer.run_id,
    }
