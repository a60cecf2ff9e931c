"""What a run's fleet is meant to be: a log of decisions on the board, one immutable record each.

Records are numbered and created exclusively, so there is an order, and whoever decides on an older state than the
newest loses: two controllers cannot both act, and one that was reaped cannot go on. A decision is written before it is
acted upon; the log is therefore never behind the machines. Islands follow it too (`--obey-fleet`): it works where the
controller cannot reach them, and where it is dead.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sprawl.board import keys
from sprawl.board.records import Record
from sprawl.board.store import MissingKey, Store
from sprawl.errors import IntegrityError


class Order(BaseModel):
    """What one island is meant to do."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    do: Literal["run", "drain"]
    since: float = Field(description="Unix seconds of the decision.")
    seen: bool = Field(False, description="It has had a live heartbeat under this order.")


class FleetRecord(Record):
    """fleet/<number>.json: one decision."""

    number: int
    state: Literal["open", "closed"] = Field(description="closed: every island ends, and nothing is started again.")
    at: float = Field(description="Unix seconds.")
    nonce: str
    target: int = Field(description="Islands that are wanted.")
    islands: dict[str, Order] = Field(default_factory=dict)
    named: int = Field(0, description="Names given so far; none is given twice.")
    changed_at: float = Field(0.0, description="When the number of islands was last changed on purpose.")
    failures: int = Field(0, description="Islands in a row that ended without ever having been alive.")
    failed_at: float = 0.0
    parked_at: float | None = Field(None, description="Since when there are no islands because the run stands still.")
    reason: str = ""


class FleetLog:
    """Reads and extends one run's log. `head` lists once and follows from there, like readers of versions do."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self._newest: FleetRecord | None = None

    def head(self) -> FleetRecord | None:
        """The newest decision, None before the first."""
        if self._newest is None:
            names = (name.removesuffix(".json") for name in self.store.children(keys.fleet_records(self.run_id)))
            numbers = [int(name) for name in names if name.isdecimal()]
            if not numbers:
                return None
            self._newest = self._read(max(numbers))
        while self._newest is not None and (later := self._read(self._newest.number + 1)) is not None:
            self._newest = later
        return self._newest

    def append(self, record: FleetRecord) -> bool:
        """Write the decision that comes after the newest known one; False when somebody else decided first.
        `number` and `nonce` are set here."""
        number = 1 if self._newest is None else self._newest.number + 1
        record = record.model_copy(update={"number": number, "nonce": secrets.token_hex(8)})
        if not self.store.create(keys.fleet_record(self.run_id, number), record.model_dump_json().encode()):
            return False
        self._newest = record
        return True

    def close(self, reason: str, now: float | None = None) -> FleetRecord:
        """Close the fleet, whoever else is deciding. Idempotent. Returns the record that closes it."""
        while True:
            head = self.head()
            if head is not None and head.state == "closed":
                return head
            self.append(closing(head, reason, time.time() if now is None else now))

    def open(self, reason: str, now: float | None = None) -> FleetRecord:
        """Open the fleet of a run, or open it again after it was closed. Idempotent."""
        while True:
            head = self.head()
            if head is not None and head.state == "open":
                return head
            at = time.time() if now is None else now
            named = head.named if head else 0
            self.append(
                FleetRecord(number=0, state="open", at=at, nonce="", target=0, named=named, changed_at=0, reason=reason)
            )

    def _read(self, number: int) -> FleetRecord | None:
        key = keys.fleet_record(self.run_id, number)
        try:
            return FleetRecord.model_validate_json(self.store.get(key))
        except MissingKey:
            return None
        except ValidationError as error:
            raise IntegrityError(
                f"{key} on board {self.store.url} is not readable: {error.errors()[0]['msg']}"
            ) from None


def closing(head: FleetRecord | None, reason: str, now: float) -> FleetRecord:
    """The decision to end everything: every island that may still be there drains."""
    islands: Mapping[str, Order] = head.islands if head else {}
    return FleetRecord(
        number=0,
        state="closed",
        at=now,
        nonce="",
        target=0,
        islands={name: Order(do="drain", since=now, seen=order.seen) for name, order in islands.items()},
        named=head.named if head else 0,
        changed_at=now,
        reason=reason,
    )


def wants(record: FleetRecord | None, island_id: str) -> bool:
    """Whether an island should go on. Islands that no decision names (started by hand) only end with the fleet."""
    if record is None:
        return True
    if record.state == "closed":
        return False
    order = record.islands.get(island_id)
    return order is None or order.do == "run"
