"""Where mirrors say that they are there, and which of them a reader should ask."""

from __future__ import annotations

import re
import time

from blake3 import blake3
from pydantic import ValidationError

from sprawl.board import keys
from sprawl.board.ledger import LOST_AFTER_INTERVALS
from sprawl.board.records import MirrorRecord
from sprawl.board.store import MissingKey, Store
from sprawl.errors import SprawlError

FORGET_AFTER_S = 3600.0
MAX_FOREIGN = 2  # mirrors of other regions that are looked at when the own one has none

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_name(name: str, option: str) -> str:
    """A region or mirror id as part of a key. Raises SprawlError naming the option."""
    if not _NAME.fullmatch(name):
        raise SprawlError(
            f"{option} {name!r} is not a name", "use up to 63 letters, digits, dots, dashes and underscores"
        )
    return name


def register(board: Store, record: MirrorRecord) -> None:
    """Overwrites the mirror's record. Raises BoardError."""
    board.put(keys.mirror(record.region, record.mirror_id), record.model_dump_json().encode())


def unregister(board: Store, record: MirrorRecord) -> None:
    board.delete(keys.mirror(record.region, record.mirror_id))


def forget_lost(board: Store, region: str) -> None:
    """Delete the records of mirrors of a region that were killed long ago. Raises BoardError."""
    for key in board.list(f"{keys.MIRRORS}{region}/"):
        try:
            record = MirrorRecord.model_validate_json(board.get(key))
        except (MissingKey, ValidationError):
            continue  # of a newer release, maybe
        if time.time() - record.heartbeat_at > FORGET_AFTER_S:
            board.delete(key)


def is_live(record: MirrorRecord, now: float) -> bool:
    """Whether the heartbeat is recent enough. `now` in Unix seconds."""
    return now - record.heartbeat_at <= LOST_AFTER_INTERVALS * record.interval_s


def discover(board: Store, region: str, reader_id: str) -> list[MirrorRecord]:
    """Live mirrors in the order in which this reader should ask them: those of its region first, and a few others only
    where there are none. Readers of a region spread over its mirrors, each always preferring the same one.

    One listing and a read a mirror. Raises BoardError when the board cannot be listed; records that cannot be read are
    left out.
    """
    found = [key for key in board.list(keys.MIRRORS) if key.endswith(".json")]
    found.sort(key=lambda key: blake3(f"{reader_id}|{key}".encode()).digest())
    own = [key for key in found if key.startswith(f"{keys.MIRRORS}{region}/")]
    live = _live(board, own, len(own))
    return live or _live(board, [key for key in found if key not in own], MAX_FOREIGN)


def mirrors(board: Store) -> list[MirrorRecord]:
    """All live mirrors by region and id."""
    found = [key for key in board.list(keys.MIRRORS) if key.endswith(".json")]
    return _live(board, found, len(found))


def _live(board: Store, found: list[str], limit: int) -> list[MirrorRecord]:
    now = time.time()
    live: list[MirrorRecord] = []
    for key in found:
        if len(live) == limit:
            break
        try:
            record = MirrorRecord.model_validate_json(board.get(key))
        except (MissingKey, ValidationError):
            continue
        if is_live(record, now):
            live.append(record)
    return live
