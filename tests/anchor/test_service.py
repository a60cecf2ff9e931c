"""The anchor on a real board: what it reads, what it folds, what it returns, and that it trains nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from sprawl.anchor import service as service_module
from sprawl.anchor.forecast import checkpoints_for, factors, project
from sprawl.anchor.replay import Replay, fold, matching_rows, replay
from sprawl.anchor.service import AnchorService, read_sign_map, serve
from sprawl.anchor.state import read_state
from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.store import MemoryStore
from sprawl.config import RunConfig
from sprawl.report.data import load_run
from sprawl.report.violations import CheckResult, run_checks
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.run.signs import SignMaps
from sprawl.train.checkpoint import bases_of, delete_checkpoint, read_blob, surplus
from tests.anchor.board import RUN, anchor_config, make_board, sampled_for, trained
from tests.train.helpers import make_decoder

FORECASTS = ("secant", "window", "fit4", "stale")


class RecordingStore(MemoryStore):
    """Remembers which keys were read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.written: list[str] = []

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return super().get(key)

    def put(self, key: str, data: bytes) -> None:
        self.written.append(key)
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self.written.append(key)
        return super().create(key, data)


def momentum(store: MemoryStore, step: int) -> dict[str, torch.Tensor]:
    record = Ledger(store, RUN).fire(step)
    assert record is not None
    return read_state(store, RUN, record)


def masters_key(anchor: AnchorService, step: int) -> str:
    record = anchor.ledger.checkpoint(step)
    assert record is not None
    return keys.checkpoint_blob(RUN, step, "masters", record.blobs["masters"])


def checks(store: MemoryStore) -> dict[str, CheckResult]:
    return {result.name: result for result in run_checks(load_run(store, RUN))}


@pytest.mark.parametrize("forecast", FORECASTS)
def test_fires_are_the_definition_from_nothing_newer_than_allowed(forecast: str) -> None:
    """M and its signs against an obvious implementation, with every checkpoint of the run on the board."""
    config = anchor_config(20, forecast=forecast, strength=0.74, window=3)
    store = RecordingStore()
    masters = make_board(store, config)
    anchor, expected = AnchorService(store, RUN), None
    shapes = {name: tuple(tensor.shape) for name, tensor in masters[0].items()}
    for step in (4, 8, 12, 16, 20):
        assert anchor.poll() == step
        store.read.clear()
        store.written.clear()
        record = anchor.fire(step)
        seen = {int(key.split("/")[2][:8]) for key in store.read if key.startswith(keys.checkpoints(RUN))}
        assert seen
        assert max(seen) <= step - config.anchor.lag
        assert not [key for key in store.read if key.startswith(keys.manifests(RUN)) and step > 4]
        assert all(key.startswith(f"{RUN}/anchor/") for key in store.written)

        used = checkpoints_for(step, config.anchor)
        ahead = zip(factors(step, used, config.anchor), (masters[at] for at in used[1:]), strict=True)
        decoder = make_decoder()
        decoder.load_served(project(masters[used[0]], ahead), torch.float32)
        expected = fold(expected, replay(decoder, sampled_for(step), config).gradients, config.anchor.fold)
        found = momentum(store, step)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        signs = read_sign_map(store, anchor.ledger, step, shapes)
        assert signs is not None
        assert all(torch.equal(signs[1][name], tensor >= 0) for name, tensor in expected.items())
        assert record.newest_step == step - 4
        assert record.checkpoints == used
        assert record.forecast == (forecast if step > 4 else "stale")
        assert (record.replayed_step, record.replayed_samples) == (step, 12)
    assert anchor.finished()
    quiet = checks(store)
    for name in ("fires", "anchor lag", "anchor optimizer", "sign maps"):
        assert quiet[name].applies
    assert quiet["anchor optimizer"].violations == quiet["anchor lag"].violations == quiet["sign maps"].violations == []


def test_a_fire_reads_the_checkpoint_that_is_new_to_it_and_no_other() -> None:
    """What the anchor holds it does not fetch again; a new process starts from the chain."""
    config = anchor_config(20, forecast="fit4", checkpoint={"whole_every": 100})
    store = RecordingStore()
    make_board(store, config)
    anchor = AnchorService(store, RUN)
    for step in (4, 8, 12, 16):
        store.read.clear()
        record = anchor.fire(step)
        blobs = [key for key in store.read if key.endswith(".safetensors") and "/checkpoints/" in key]
        assert blobs == [masters_key(anchor, step - 4)]
        assert record.checkpoint_bytes == len(store._objects[blobs[0]])
    assert anchor._masters.held == [4, 8, 12]  # with 16 to come, what the fire at 20 reads
    store.read.clear()
    again = AnchorService(store, RUN)
    assert again.poll() == 20
    again.fire(20)
    assert sorted({key for key in store.read if "/masters" in key}) == [
        masters_key(again, at) for at in (0, 4, 8, 12, 16)
    ]


@pytest.mark.parametrize("forecast", FORECASTS)
def test_retention_keeps_what_the_anchor_still_reads_and_nothing_else(forecast: str) -> None:
    """Trainer and anchor side by side, the anchor two fires late: it never misses a checkpoint, and each one on the
    board is among the newest, read by a fire to come, or in the chain of one that is."""
    config = anchor_config(28, forecast=forecast, window=3, checkpoint={"keep": 1})
    store = MemoryStore()
    ledger = Ledger(store, RUN)
    signs = SignMaps(store, ledger, config.anchor, {}, "")
    anchor: AnchorService | None = None
    for step, _ in trained(store, config):
        anchor = anchor or AnchorService(store, RUN)
        if step >= 12 and step % 4 == 0:
            due = anchor.poll()
            assert due == step - 8
            anchor.fire(due)
        if step % 2:
            continue
        for gone in surplus(
            ledger.checkpoints(), 1, signs.checkpoints_needed(config.steps), lambda at: bases_of(ledger, at)
        ):
            delete_checkpoint(store, RUN, gone)
            for kept in ledger.checkpoints():  # at any moment: no delta without its base
                assert bases_of(ledger, kept) <= set(ledger.checkpoints())
        wanted = {at for fire in range(anchor.next_fire(), 29, 4) for at in checkpoints_for(fire, config.anchor)} | {
            step
        }
        for at in list(wanted):
            while base := bases_of(ledger, at):
                wanted |= base
                (at,) = base
        assert set(ledger.checkpoints()) == {at for at in wanted if at <= step}
    assert anchor is not None
    while not anchor.finished():
        anchor.fire(anchor.poll() or 0)
    assert len(ledger.fires()) == 7


def mixed(step: int) -> RolloutBatch:
    """Without exact versions: the first group was sampled a version later, the second changed over in its middle."""
    batch = sampled_for(step)
    start, end = batch.version_start.clone(), batch.version_end.clone()
    start[:4] += 1
    end[:5] += 1
    return dataclasses.replace(batch, version_start=start, version_end=end)


@pytest.mark.parametrize("batches", [sampled_for, mixed])
def test_matching_replay_is_of_the_weights_it_holds_exactly(batches: Callable[[int], RolloutBatch]) -> None:
    config = anchor_config(12, replay="matching")
    store = MemoryStore()
    masters = make_board(store, config, batches)
    anchor, expected = AnchorService(store, RUN), None
    serve(anchor)
    for step in (4, 8, 12):
        record = anchor.ledger.fire(step)
        assert record is not None
        assert record.checkpoints == [step - 4]
        assert record.forecast == "stale"
        assert record.replayed_versions == [step - 4, step - 4]
        batch = batches(record.replayed_step)
        rows = matching_rows(batch, step - 4)
        assert record.replayed_samples == len(rows) == (12 if batches is sampled_for else 4)
        assert rows.tolist() == list(range(12 - len(rows), 12))
        decoder = make_decoder()
        decoder.load_served(masters[step - 4], torch.float32)
        expected = fold(expected, replay(decoder, batch, config, rows=rows).gradients, 0.25)
    found = momentum(store, 12)
    assert expected is not None
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert checks(store)["anchor lag"].violations == []


def test_replayed_rows_are_a_batch_of_their_own() -> None:
    config, batch = anchor_config(), sampled_for(3)
    part = {
        field.name: value[4:8]
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    alone = replay(make_decoder(), dataclasses.replace(batch, islands=("a",), **part), config)
    among = replay(make_decoder(), batch, config, rows=torch.arange(4, 8))
    assert alone.grad_norm > 0
    assert all(torch.allclose(among.gradients[name], alone.gradients[name], atol=1e-6) for name in alone.gradients)


def foreign(step: int) -> RolloutBatch:
    """As if no version that the anchor holds had sampled anything, up to step 8."""
    batch = sampled_for(step)
    return dataclasses.replace(batch, version_start=batch.version_start - 1) if step <= 8 else batch


def test_without_anything_to_replay_m_stays_and_corrects_nothing() -> None:
    config = anchor_config(12, replay="matching")
    store = MemoryStore()
    shapes = {name: tuple(tensor.shape) for name, tensor in make_board(store, config, foreign)[0].items()}
    anchor = AnchorService(store, RUN)
    serve(anchor)
    signs = SignMaps(store, anchor.ledger, config.anchor, shapes, "")
    for step, direction in ((4, False), (8, False), (12, True)):
        record = anchor.ledger.fire(step)
        assert record is not None
        assert (record.has_direction, record.replayed_samples) == (direction, 12 if direction else 0)
        signs.use(step)
        assert (signs.signs is not None) == direction
        assert signs.weights_step == step - 4
    assert checks(store)["sign maps"].violations == []


def test_a_gradient_that_is_not_finite_leaves_m_as_it_is() -> None:
    def broken(step: int) -> RolloutBatch:
        batch = sampled_for(step)
        return dataclasses.replace(batch, rewards=batch.rewards * math.nan) if step == 8 else batch

    store = MemoryStore()
    config = anchor_config(8)
    for _ in trained(store, config, broken):
        pass
    anchor = AnchorService(store, RUN)
    anchor.fire(4)
    before = momentum(store, 4)
    assert math.isnan(anchor.fire(8).grad_norm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in momentum(store, 8).items())


def test_a_replay_that_trains_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evidence is measured: an optimizer step in the replay, or any other change of its weights, is a violation."""

    def training(decoder, batch, config: RunConfig, observer=None, rows=None) -> Replay:  # type: ignore[no-untyped-def]
        result = replay(decoder, batch, config, observer, rows)
        parameter = next(decoder.parameters())
        parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD([parameter], lr=1e-6).step()
        return result

    def writing(decoder, batch, config: RunConfig, observer=None, rows=None) -> Replay:  # type: ignore[no-untyped-def]
        with torch.no_grad():
            next(decoder.parameters()).view(-1)[0] += 1e-3
        return replay(decoder, batch, config, observer, rows)

    store = MemoryStore()
    make_board(store, anchor_config(12))
    anchor = AnchorService(store, RUN)
    anchor.fire(4)
    assert checks(store)["anchor optimizer"].violations == []
    monkeypatch.setattr(service_module, "replay", training)
    assert anchor.fire(8).optimizer_steps == 1
    monkeypatch.setattr(service_module, "replay", writing)
    assert anchor.fire(12).optimizer_steps == 0
    assert checks(store)["anchor optimizer"].violations == [
        "fire at step 8 stepped an optimizer 1 times",
        "fires whose replay changed the weights it ran at: 8, 12",
    ]


def test_masters_are_read_whole_whatever_their_chain() -> None:
    config = anchor_config(12)
    store = MemoryStore()
    masters = make_board(store, config)
    for step in range(0, 13, 2):
        found = read_blob(store, Ledger(store, RUN), step, "masters")
        assert all(torch.equal(found[name], tensor) for name, tensor in masters[step].items())
