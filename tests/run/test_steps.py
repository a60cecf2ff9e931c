"""Steps of a run: each once and in order, published with its record, and only by whoever has the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sprawl.board.commit import CommitOptions
from sprawl.board.ledger import Ledger
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.receipts import PublishReceipt
from sprawl.board.store import MemoryStore
from sprawl.errors import Diverged, FencedError, SprawlError
from sprawl.rollout.client.metrics import ClientMetrics
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.run.closing import close_books
from sprawl.run.collector import Collected
from sprawl.run.controller import Controller
from sprawl.run.fleet import Unmanaged
from sprawl.run.opening import OpenedRun, TakenRun
from sprawl.run.signs import SignMaps
from sprawl.run.steps import Steps
from sprawl.train.codecs.base import WireCounter
from sprawl.train.steering import Steering
from sprawl.train.trainer import StepStats
from tests.board.states import state_of
from tests.report.plausible import make_run_record
from tests.train.helpers import make_batch, make_config

RUN = "run-1"
STATS = StepStats(0.1, 1.0, True, 1.3, None, 0.2, None, 0.3, None, 0.0, 0.0, 1, None, WireCounter())


class FewWeights:
    """A trainer whose weights after step n are `state_of(n)`; it publishes them for real."""

    def __init__(self, run: TakenRun) -> None:
        options = CommitOptions(keyframe_every=4, dtype="bfloat16", epoch=run.epoch)
        self._publisher = Publisher(run.store, run.run_id, options)
        self.trained: list[int] = []
        self.stats = STATS

    def train(self, step: int, batch: RolloutBatch, signs: SignMaps, steering: Steering) -> StepStats:
        assert batch.step == step
        self.trained.append(step)
        return self.stats

    def publish(self, version: int, extra: Mapping[str, Any]) -> PublishReceipt:
        return self._publisher.publish(version, version, state_of(version), extra=dict(extra))

    def check(self) -> None:
        pass


class Batches:
    """A collector that has every batch."""

    def __init__(self) -> None:
        self.ahead: list[int] = []

    def wait(self, step: int, idle: Callable[[], None]) -> Collected:
        idle()
        return Collected(make_batch(step=step), False, 0.25)

    def run_ahead(self, step: int) -> None:
        self.ahead.append(step)


class Place:
    """A run on a board in memory, taken over by one process."""

    def __init__(self, store: MemoryStore) -> None:
        config = make_config(anchor={"enabled": False}, steps=9)
        opened = OpenedRun(config, store.url, store, RUN, False, Path("logs"), Unmanaged(), None, None)
        self.run = opened.take_over()
        self.events: list[tuple[str, int]] = []
        self.trainer = FewWeights(self.run)
        self.sampler = Batches()
        signs = SignMaps(self.run.store, self.run.ledger, config.anchor, {}, "")
        control = Controller(config, self.run.ledger, self.report)
        reader = VersionReader(self.run.store, RUN)
        self.steps = Steps(self.run, reader, self.trainer, signs, control, 7, self.report)  # type: ignore[arg-type]

    def report(self, kind: str, message: str, data: dict[str, Any], step: int) -> None:
        self.events.append((kind, step))

    def train(self, step: int):
        return self.steps.train(step, self.sampler, lambda: None)  # type: ignore[arg-type]

    def step(self, step: int) -> None:
        self.steps.collect(step, self.sampler)  # type: ignore[arg-type]
        self.train(step)
        self.steps.publish(step)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    Ledger(store, RUN).create_run(make_run_record(run_id=RUN))
    return store


@pytest.fixture
def place(store: MemoryStore) -> Place:
    place = Place(store)
    place.trainer.publish(0, {})
    return place


def test_a_step_is_trained_once_and_in_order(place: Place) -> None:
    with pytest.raises(SprawlError, match="step 2 cannot be trained after step 0"):
        place.train(2)
    assert not place.train(1).skipped
    assert place.train(1).skipped
    assert place.trainer.trained == [1]
    assert place.sampler.ahead == [1]
    with pytest.raises(SprawlError, match="step 2 has not been trained"):
        place.steps.publish(2)


def test_a_published_step_has_its_record_and_its_receipt(place: Place) -> None:
    for step in (1, 2):
        place.step(step)
    assert place.steps.head == 2
    record = place.run.ledger.step(2)
    assert record is not None
    assert (record.epoch, record.version, record.seconds["rollout"]) == (1, 2, 0.25)
    assert {"rollout_wait", "train", "publish", "checkpoint", "total"} <= set(record.seconds)
    again = place.steps.published(2)
    assert again.already_committed
    assert again.root_digest == place.steps.published(2).root_digest != place.steps.published(1).root_digest
    with pytest.raises(SprawlError, match="version 5 of run-1 is not on the board"):
        place.steps.published(5)


def test_refused_steps_in_a_row_end_the_run(place: Place) -> None:
    refused = replace(STATS, applied=False)
    for step, stats in enumerate((refused, refused, STATS, refused, refused), start=1):
        place.trainer.stats = stats
        place.step(step)
    place.trainer.stats = refused
    with pytest.raises(Diverged, match="3 steps in a row had a gradient that is not finite, last at step 6"):
        place.train(6)
    assert place.events == [("violation", 6)]


def test_a_run_that_another_process_took_over_is_left_alone(place: Place, store: MemoryStore) -> None:
    place.step(1)
    place.train(2)
    other = Place(store)
    assert other.run.epoch == place.run.epoch + 1
    with pytest.raises(FencedError):
        place.steps.publish(2)
    assert place.steps.head == 1
    assert VersionReader(store, RUN).head() == 1


def test_the_books_are_closed_with_every_version_checked(place: Place) -> None:
    for step in (1, 2, 3):
        place.step(step)
    finished = close_books(place.run, 3, ClientMetrics(groups=9, attempts=10), place.report)
    assert (finished.run_id, finished.steps, finished.versions_verified) == (RUN, 3, 4)
    assert place.events == [("client_report", 3), ("verify", 3), ("finish", 3)]
