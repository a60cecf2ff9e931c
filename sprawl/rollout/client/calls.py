"""What a client can ask of an island, and what becomes of one attempt: an answer that was checked, or why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import httpx
from pydantic import ValidationError

from sprawl.board.records import IslandRecord
from sprawl.errors import SprawlError
from sprawl.rollout.client.checks import completion_fault, generation_fault
from sprawl.rollout.client.metrics import Failure
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, NotReady, VersionPolicy

T_co = TypeVar("T_co", covariant=True)
Route = Literal["/v1/completions", "/v1/chat/completions"]


class TryElsewhere(Exception):
    """This attempt failed in a way that another one may not. `pause_s`: how long the island asks to be left alone."""

    def __init__(self, reason: Failure, message: str, pause_s: float = 0.0) -> None:
        self.reason: Failure = reason
        self.pause_s = pause_s
        super().__init__(message)


class Passed(Exception):
    """This island will never serve the request: it is past the version asked for."""


class Call(Protocol[T_co]):
    """One thing asked, possibly of several islands one after another or of two at once."""

    @property
    def size(self) -> int:
        """How much work it is, for telling a straggler from a long group: tokens at most."""

    async def attempt(self, http: httpx.AsyncClient, record: IslandRecord, connect_s: float) -> T_co:
        """Ask this island. Raises TryElsewhere, Passed or SprawlError (no island would take it)."""


@dataclass
class GenerateCall:
    """/generate, answered whole."""

    request: GenerateRequest

    @property
    def size(self) -> int:
        return self.request.sampling_params.n * self.request.sampling_params.max_new_tokens

    async def attempt(self, http: httpx.AsyncClient, record: IslandRecord, connect_s: float) -> GenerateResponse:
        answer = await post(http, record, "/generate", self.request.model_dump_json(exclude_none=True), connect_s)
        return read_generation(answer.content, self.request)


@dataclass(frozen=True)
class Completion:
    """An answer of an OpenAI route as the island gave it, and which island that was."""

    body: dict[str, Any]
    island_id: str


@dataclass
class CompletionCall:
    """An OpenAI route, answered whole. `body` is sent as it is, with the policy as `weight_version`."""

    route: Route
    body: Mapping[str, Any]
    policy: VersionPolicy

    @property
    def size(self) -> int:
        limit = self.body.get("max_completion_tokens") or self.body.get("max_tokens") or 256
        return int(limit) * int(self.body.get("n") or 1)

    async def attempt(self, http: httpx.AsyncClient, record: IslandRecord, connect_s: float) -> Completion:
        body = {**self.body, "stream": False, "weight_version": self.policy.model_dump(exclude_none=True)}
        answer = await post(http, record, self.route, json.dumps(body), connect_s)
        try:
            data = answer.json()
        except ValueError:
            raise TryElsewhere("lie", "its answer is not JSON") from None
        if fault := completion_fault(data, self.body, self.policy):
            raise TryElsewhere("lie", fault)
        return Completion(data, record.island_id)


def read_generation(content: bytes | str, request: GenerateRequest) -> GenerateResponse:
    """Parse an answer of /generate and hold it against the request. Raises TryElsewhere."""
    try:
        response = GenerateResponse.model_validate_json(content)
    except ValidationError as error:
        raise TryElsewhere("lie", f"its answer is not a GenerateResponse: {error.errors()[0]['msg']}") from None
    if fault := generation_fault(response, request):
        raise TryElsewhere("lie", fault)
    return response


async def post(
    http: httpx.AsyncClient, record: IslandRecord, route: str, content: bytes | str, connect_s: float
) -> httpx.Response:
    """The 200 of one POST. Raises what `judge` makes of anything else."""
    try:
        answer = await http.post(
            f"{record.url.rstrip('/')}{route}",
            content=content,
            headers={"Content-Type": "application/json"},
            timeout=httpx.Timeout(None, connect=connect_s),
        )
    except httpx.HTTPError as error:
        raise broken(error) from None
    if answer.status_code != 200:
        raise judge(answer.status_code, answer.headers, answer.content, record)
    return answer


def broken(error: httpx.HTTPError) -> TryElsewhere:
    return TryElsewhere("reset", f"{type(error).__name__}: {error}".rstrip(": "))


def judge(status: int, headers: Mapping[str, str], content: bytes, record: IslandRecord) -> Exception:
    """What a refusal means: Passed, TryElsewhere, or SprawlError when no island would answer otherwise."""
    if status == 409:
        try:
            refusal = NotReady.model_validate_json(content)
        except ValidationError:
            return TryElsewhere("unavailable", "an unreadable 409")
        return TryElsewhere("behind", refusal.message) if refusal.retryable else Passed(refusal.message)
    message = f"{status} {_error_message(content)}"
    if status >= 500 or status in (408, 429):
        return TryElsewhere("unavailable", message, _retry_after(headers))
    return SprawlError(f"island {record.island_id} at {record.url} refused the request: {message}")


def _error_message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")


def _retry_after(headers: Mapping[str, str]) -> float:
    try:
        return min(30.0, max(0.0, float(headers.get("retry-after", 0))))
    except ValueError:  # an HTTP date
        return 0.0
