"""Small results that a task can return: no tensors, only what happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Receipt:
    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PublishReceipt(Receipt):
    version: int
    step: int
    kind: str  # keyframe | delta
    sent_bytes: int
    full_bytes: int
    changed_share: float
    root_digest: str
    seconds: float
    already_committed: bool  # the same version was on the board (a retry or a replay)
