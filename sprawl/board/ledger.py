"""The run's ledger on the board: immutable JSON records, island heartbeats and the writer's fencing epoch."""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Container
from typing import TypeVar

from pydantic import ValidationError

from sprawl.board import keys
from sprawl.board.records import (
    CheckpointRecord,
    EvaluationRecord,
    EventRecord,
    FireRecord,
    FireRequest,
    IslandRecord,
    PromotionRecord,
    Record,
    RunRecord,
    StepRecord,
)
from sprawl.board.store import MissingKey, Store
from sprawl.errors import BoardError, FencedError, IntegrityError, SprawlError

R = TypeVar("R", bound=Record)

LOST_AFTER_INTERVALS = 3


class Ledger:
    """Reads and writes one run's records. The `write_*` methods create exclusively and say whether ours is there;
    a record that already exists is kept."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id

    # Run

    def create_run(self, record: RunRecord) -> None:
        """Raises SprawlError when the run exists."""
        if not self._create(keys.run(self.run_id), record):
            raise SprawlError(
                f"run {self.run_id!r} already exists on board {self.store.url}",
                f"resume it with --resume {self.run_id}, or choose another --run-id",
            )

    def run(self) -> RunRecord:
        """Raises BoardError naming the runs that do exist."""
        record = self._read(keys.run(self.run_id), RunRecord)
        if record is None:
            raise BoardError(f"no run {self.run_id!r} on board {self.store.url}", _known_runs(self.store))
        return record

    # Steps, evaluations, fires, events

    def write_step(self, record: StepRecord) -> bool:
        return self._create(keys.step(self.run_id, record.step), record)

    def step(self, step: int) -> StepRecord | None:
        return self._read(keys.step(self.run_id, step), StepRecord)

    def steps(self) -> list[StepRecord]:
        """Ascending."""
        return self._read_all(keys.steps(self.run_id), StepRecord)

    def write_evaluation(self, record: EvaluationRecord) -> bool:
        return self._create(keys.evaluation(self.run_id, record.version), record)

    def evaluations(self) -> list[EvaluationRecord]:
        """Ascending by version."""
        return self._read_all(keys.evaluations(self.run_id), EvaluationRecord)

    def write_fire(self, record: FireRecord) -> bool:
        return self._create(keys.fire(self.run_id, record.step), record)

    def fire(self, step: int) -> FireRecord | None:
        return self._read(keys.fire(self.run_id, step), FireRecord)

    def fires(self) -> list[FireRecord]:
        """Ascending by step."""
        return self._read_all(keys.fires(self.run_id), FireRecord)

    def write_fire_request(self, request: FireRequest) -> bool:
        return self._create(keys.fire_request(self.run_id, request.step), request)

    def fire_requests(self) -> list[int]:
        """Steps of the fires asked for between the regular ones, ascending."""
        names = (name.removesuffix(".json") for name in self.store.children(keys.fire_requests(self.run_id)))
        return sorted(int(name) for name in names if name.isdecimal())

    def write_event(self, record: EventRecord) -> None:
        """Never conflicts: the name sorts by time and ends in random digits."""
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        self.store.put(keys.event(self.run_id, name), _encode(record))

    def events(self) -> list[EventRecord]:
        """In the order they were written."""
        return self._read_all(keys.events(self.run_id), EventRecord)

    def event(self, name: str) -> EventRecord | None:
        """One event by its name on the board (without .json)."""
        return self._read(keys.event(self.run_id, name), EventRecord)

    # Checkpoints

    def write_checkpoint(self, record: CheckpointRecord) -> bool:
        return self._create(keys.checkpoint(self.run_id, record.step), record)

    def checkpoint(self, step: int) -> CheckpointRecord | None:
        return self._read(keys.checkpoint(self.run_id, step), CheckpointRecord)

    def checkpoints(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        prefix = keys.checkpoints(self.run_id)
        names = (name.removesuffix(".json") for name in self.store.children(prefix) if name.endswith(".json"))
        return sorted(int(name) for name in names if name.isdecimal())

    # Islands

    def heartbeat(self, record: IslandRecord) -> None:
        """Overwrites the island's record."""
        self.store.put(keys.island(self.run_id, record.island_id), _encode(record))

    def islands(self) -> list[IslandRecord]:
        """All registered islands by id, lost ones included (see `is_live`)."""
        return self._read_all(keys.islands(self.run_id), IslandRecord)

    def remove_island(self, island_id: str) -> None:
        self.store.delete(keys.island(self.run_id, island_id))

    # Promotions: what people decided about versions

    def write_promotion(self, record: PromotionRecord) -> bool:
        """False when this version has been decided on before: a decision stands."""
        return self._create(keys.promotion(self.run_id, record.version), record)

    def promotion(self, version: int) -> PromotionRecord | None:
        return self._read(keys.promotion(self.run_id, version), PromotionRecord)

    def promotions(self) -> list[PromotionRecord]:
        """Ascending by version."""
        return self._read_all(keys.promotions(self.run_id), PromotionRecord)

    def read_new(self, prefix: str, kind: type[R], known: Container[str]) -> dict[str, R]:
        """The records under `prefix` whose keys are not `known`, by key: for a watcher that reads again and again."""
        records = {key: self._read(key, kind) for key in self.store.list(prefix) if key not in known}
        return {key: record for key, record in records.items() if record is not None}

    # Fencing

    def acquire_epoch(self) -> int:
        """Become the run's one writer: every holder of a lower epoch is fenced from now on."""
        claim = {"nonce": secrets.token_hex(16), "host": platform.node(), "pid": os.getpid(), "at": time.time()}
        data = json.dumps(claim).encode()
        names = (name.removesuffix(".json") for name in self.store.children(keys.epochs(self.run_id)))
        epoch = max((int(name) for name in names if name.isdecimal()), default=0) + 1
        while not self.store.create(keys.epoch(self.run_id, epoch), data):
            epoch += 1
        return epoch

    def epoch_taken_at(self, epoch: int) -> float:
        """Unix seconds at which a writer took this epoch; 0 when there is none."""
        try:
            return float(json.loads(self.store.get(keys.epoch(self.run_id, epoch))).get("at", 0.0))
        except (MissingKey, ValueError, AttributeError):
            return 0.0

    def check_epoch(self, epoch: int) -> None:
        """Raises FencedError when a newer writer exists. One cheap request: epochs are handed out one by one."""
        if self.store.exists(keys.epoch(self.run_id, epoch + 1)):
            raise FencedError(
                f"another process took over run {self.run_id!r} (its epoch is newer than our {epoch})",
                "stop this one",
            )

    def _create(self, key: str, record: Record) -> bool:
        return self.store.create(key, _encode(record))

    def _read(self, key: str, kind: type[R]) -> R | None:
        try:
            data = self.store.get(key)
        except MissingKey:
            return None
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "content"
            raise IntegrityError(
                f"{key} on board {self.store.url} is not readable: {where}: {first['msg']}",
                "it is damaged, or of a release that this one cannot read: restore it, or move its run away",
            ) from None

    def _read_all(self, prefix: str, kind: type[R]) -> list[R]:
        # Keys sort like their numbers (zero-padded). An island may unregister between listing and reading.
        records = (self._read(key, kind) for key in self.store.list(prefix))
        return [record for record in records if record is not None]


def is_live(record: IslandRecord, now: float | None = None) -> bool:
    """Whether an island's heartbeat is recent enough and it has not failed. `now` in Unix seconds."""
    age = (time.time() if now is None else now) - record.heartbeat_at
    return record.state != "failed" and age <= LOST_AFTER_INTERVALS * record.interval_s


def list_runs(store: Store) -> list[RunRecord]:
    """Runs on the board, newest first."""
    records = (find_run(store, name) for name in store.children(""))
    return sorted((r for r in records if r is not None), key=lambda r: (r.created_at, r.run_id), reverse=True)


def find_run(store: Store, run_id: str) -> RunRecord | None:
    """The record of a run, None when there is no such run (yet)."""
    return Ledger(store, run_id)._read(keys.run(run_id), RunRecord)


def resolve_run(store: Store, run_id: str) -> str:
    """A run id as typed by a person: `latest` is the newest run. Raises BoardError when there is no such run."""
    if run_id == "latest":
        runs = list_runs(store)
        if not runs:
            raise BoardError(f"board {store.url} has no runs", "start one with `sprawl run configs/tiny.yaml`")
        return runs[0].run_id
    return Ledger(store, run_id).run().run_id


def wait_for_run(store: Store, run_id: str, patience_s: float, poll_s: float = 2.0) -> str:
    """As `resolve_run`, for a process that may be there before the run: asks again until there is one, or `patience_s`
    have passed. Raises BoardError then."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return resolve_run(store, run_id)
        except BoardError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))


def _known_runs(store: Store) -> str:
    names = [record.run_id for record in list_runs(store)]
    if not names:
        return "the board has no runs"
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"runs there: {', '.join(names[:10])}{more}"


def _encode(record: Record) -> bytes:
    return record.model_dump_json().encode()
