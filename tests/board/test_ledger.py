import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sprawl.board import keys
from sprawl.board.ledger import Ledger, is_live, list_runs, resolve_run
from sprawl.board.records import CheckpointRecord, EventRecord, IslandRecord, RunRecord, StepRecord, Views, Wire
from sprawl.board.store import Store
from sprawl.errors import BoardError, FencedError, IntegrityError, SprawlError


def run_record(run_id: str, created_at: float = 1.0) -> RunRecord:
    return RunRecord(
        run_id=run_id, created_at=created_at, config={"steps": 3}, base_digest="d", parameters=1, sprawl_version="0"
    )


def step_record(step: int, grad_norm: float = 1.0) -> StepRecord:
    views, wire = Views(compression=1.0), Wire(sent=1, dense=2)
    values = {
        name: 0.0
        for name, field in StepRecord.model_fields.items()
        if field.annotation is float and field.is_required()
    }
    counts = {name: 0 for name, field in StepRecord.model_fields.items() if field.annotation is int}
    return StepRecord.model_validate(
        {
            **values,
            **counts,
            "format": 1,
            "step": step,
            "grad_norm": grad_norm,
            "entropy": views,
            "kl": Views(compression=math.nan),
            "applied": True,
            "boundary": wire,
            "delta": wire,
            "sign": wire,
            "seconds": {"train": 1.0},
        }
    )


def test_records_round_trip_in_order_and_are_written_once(store: Store) -> None:
    ledger = Ledger(store, "r")
    for step in (2, 1, 10):
        assert ledger.write_step(step_record(step))
    assert [record.step for record in ledger.steps()] == [1, 2, 10]
    assert not ledger.write_step(step_record(2, grad_norm=5.0))
    kept = ledger.step(2)
    assert kept is not None
    assert kept.grad_norm == 1.0
    assert ledger.step(3) is None


def test_non_finite_numbers_survive(store: Store) -> None:
    ledger = Ledger(store, "r")
    ledger.write_step(step_record(1, grad_norm=math.inf))
    record = ledger.step(1)
    assert record is not None
    assert record.grad_norm == math.inf
    assert math.isnan(record.kl.compression)
    ledger.write_step(step_record(2, grad_norm=math.nan))
    assert math.isnan(ledger.steps()[1].grad_norm)


def test_runs(store: Store) -> None:
    with pytest.raises(BoardError, match="has no runs"):
        resolve_run(store, "latest")
    Ledger(store, "old").create_run(run_record("old", 1.0))
    Ledger(store, "new").create_run(run_record("new", 2.0))
    store.put("stray/file", b"")
    assert [record.run_id for record in list_runs(store)] == ["new", "old"]
    assert resolve_run(store, "latest") == "new"
    assert resolve_run(store, "old") == "old"
    with pytest.raises(BoardError, match=r"no run 'typo'.*new, old"):
        resolve_run(store, "typo")
    with pytest.raises(SprawlError, match="already exists"):
        Ledger(store, "old").create_run(run_record("old", 3.0))


def test_events_keep_their_order(store: Store) -> None:
    ledger = Ledger(store, "r")
    for i in range(5):
        ledger.write_event(EventRecord(kind="start", at=0.0, step=i, message=""))
    assert [event.step for event in ledger.events()] == [0, 1, 2, 3, 4]


def test_checkpoints_ignore_their_blobs(store: Store) -> None:
    ledger = Ledger(store, "r")
    for step in (10, 5):
        store.put(keys.checkpoint_blob("r", step, "masters"), b"")
        ledger.write_checkpoint(CheckpointRecord(step=step, epoch=1, blobs={}, bytes=0, created_at=0.0))
    store.put(keys.checkpoint_blob("r", 15, "masters"), b"")
    assert ledger.checkpoints() == [5, 10]
    assert ledger.checkpoint(15) is None


def test_islands(store: Store) -> None:
    ledger = Ledger(store, "r")
    now = time.time()
    beat = IslandRecord(
        island_id="i0", url="http://x", state="ready", applied=3, started_at=now, heartbeat_at=now, interval_s=2.0
    )
    ledger.heartbeat(beat)
    ledger.heartbeat(beat.model_copy(update={"applied": 4}))
    (island,) = ledger.islands()
    assert island.applied == 4
    assert is_live(island, now + 5.9)
    assert not is_live(island, now + 6.1)
    assert not is_live(island.model_copy(update={"state": "failed"}), now)
    ledger.remove_island("i0")
    assert ledger.islands() == []


def test_epochs_fence(store: Store) -> None:
    ledger = Ledger(store, "r")
    with ThreadPoolExecutor(6) as pool:
        epochs = sorted(pool.map(lambda _: ledger.acquire_epoch(), range(6)))
    assert epochs == [1, 2, 3, 4, 5, 6]
    ledger.check_epoch(6)
    for epoch in range(1, 6):
        with pytest.raises(FencedError):
            ledger.check_epoch(epoch)


def test_a_damaged_record_is_named(store: Store) -> None:
    store.put(keys.step("r", 1), b'{"step": 1}')
    with pytest.raises(IntegrityError, match=r"00000001\.json"):
        Ledger(store, "r").steps()
