"""The samples of one group while they are being generated: pure bookkeeping shared by the embedded engine and the
fake."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sprawl.rollout.wire import Sample, VersionSpan


@dataclass
class Row:
    """One sample in the making. `versions[i]` is the version that generated token i. `taken` tokens came before
    them: generated elsewhere, they count towards the limit only."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: Literal["stop", "length"] | None = None
    taken: int = 0

    @classmethod
    def after(cls, taken: Sequence[int], stops: Collection[int], limit: int) -> Row:
        """A sample that has these tokens already, and may be complete with them."""
        row = cls(taken=len(taken))
        if taken and taken[-1] in stops:
            row.finished = "stop"
        elif len(taken) >= limit:
            row.finished = "length"
        return row

    def push(self, token: int, logprob: float, version: int, stops: Collection[int], limit: int) -> None:
        """Append a token; the row finishes at a stop token (kept) or at `limit` tokens."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in stops:
            self.finished = "stop"
        elif self.taken + len(self.token_ids) >= limit:
            self.finished = "length"

    def sample(self) -> Sample:
        return Sample(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finished or "abort",
            spans=spans_of(self.versions),
        )


def spans_of(versions: list[int]) -> list[VersionSpan]:
    """Run-length form of the version of every token."""
    spans: list[VersionSpan] = []
    for position, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version=version, start=spans[-1].start, end=position + 1)
        else:
            spans.append(VersionSpan(version=version, start=position, end=position + 1))
    return spans
