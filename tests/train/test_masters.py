"""Masters as deltas: which are whole, to the bit and in bounded pieces, chains on a board, and what a lost one says."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.store import MemoryStore
from sprawl.config import RunConfig
from sprawl.delta.state import State, clone_state, tensor_digests
from sprawl.errors import BoardError, IntegrityError
from sprawl.policy.stage import StagePlace, load_stage, stage_decoder
from sprawl.train import masters as masters_module
from sprawl.train.chains import MastersReader, MastersWriter
from sprawl.train.checkpoint import (
    Shard,
    bases_of,
    commit_checkpoint,
    delete_checkpoint,
    read_blob,
    restore,
    surplus,
    write_shard,
)
from sprawl.train.masters import DeltaPlan, apply_masters, encode_masters
from sprawl.train.trainer import Trainer, make_optimizer
from tests.train.helpers import make_batch, make_config, make_decoder

ODD_BITS = [0x7FC00000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0x7F800000, 0xFF800000, 0x80000000, 0x00000000, 0x00000001]


def config(anchor: bool = True, whole_every: int = 3, **settings: int) -> RunConfig:
    return make_config(
        anchor={"enabled": anchor, "every": 4, "lag": 4, **settings},
        checkpoint={"every": 2, "whole_every": whole_every},
    )


def equal(one: State, other: State) -> bool:
    return tensor_digests(one) == tensor_digests(other)


def test_hubs_are_what_the_anchor_reads_and_only_they_are_bases() -> None:
    plan = DeltaPlan.of(config())
    # 12 and 24 are the third and the sixth hub.
    expected = [None, 0, 0, 4, 4, 8, None, 12, 12, 16, 16, 20, None, 24]
    assert [plan.base(step) for step in range(0, 27, 2)] == expected
    ahead = DeltaPlan.of(config(lag=6, every=4))
    assert [ahead.base(step) for step in (0, 2, 4, 6, 8, 10)] == [None, 0, 2, 2, 6, None]
    for changes in ({}, {"lag": 2}, {"lag": 6}, {"lag": 20}):
        run = config(whole_every=5, **changes)
        plan = DeltaPlan.of(run)
        read = {max(0, fire - run.anchor.lag) for fire in range(4, 200, 4)}
        assert all(plan.is_hub(step) for step in read)
        for step in range(0, 180, 2):
            chain = [step]
            while (base := plan.base(chain[-1])) is not None:
                assert base < chain[-1]
                assert plan.is_hub(base)
                chain.append(base)
            assert len(chain) <= 6
    alone = DeltaPlan.of(config(anchor=False))
    assert [alone.base(step) for step in (0, 2, 4, 6, 8, 9)] == [None, 0, 2, None, 6, 8]
    assert {DeltaPlan.of(config(whole_every=1)).base(step) for step in range(0, 30, 2)} == {None}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1), st.sampled_from([1e-7, 1e-3, 10.0]))
def test_a_delta_is_exact_to_the_bit(seed: int, share: float, push: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 11), "scalar": (), "empty": (0, 3), "odd": (len(ODD_BITS),), "b": (300,)}
    old = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    odd = torch.tensor(ODD_BITS, dtype=torch.int64).to(torch.int32)
    old["odd"] = odd.view(torch.float32)[torch.randperm(len(ODD_BITS), generator=generator)]
    new = clone_state(old)
    for name in ("a", "scalar", "b"):
        moved = torch.rand(shapes[name], generator=generator) < share
        new[name] += moved * torch.randn(shapes[name], generator=generator) * push
    new["odd"] = odd.view(torch.float32)
    before = tensor_digests(old)
    blob = encode_masters(old, new)
    assert tensor_digests(old) == before
    state = clone_state(old)
    apply_masters(state, blob, "delta")
    assert equal(state, new)
    assert encode_masters(old, new) == blob


def test_large_masters_go_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part holds more elements than the bound that memory is promised for, wherever tensors end."""
    monkeypatch.setattr(masters_module, "PART", 100)
    seen = []
    real = masters_module.encode

    def watching(base: State, new: State, **options: int):  # type: ignore[no-untyped-def]
        seen.append(sum(tensor.numel() for tensor in new.values()))
        return real(base, new, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(masters_module, "encode", watching)
    old = {"a": torch.randn(33, 9), "b": torch.randn(3), "c": torch.randn(100)}
    new = {name: tensor * 1.0001 for name, tensor in old.items()}
    blob = encode_masters(old, new)
    assert seen == [100, 100, 100, 100]
    apply_masters(old, blob, "delta")
    assert equal(old, new)


def test_what_is_no_delta_of_these_masters_is_refused() -> None:
    old = {"a": torch.randn(50)}
    blob = encode_masters(old, {"a": old["a"] * 1.5})
    with pytest.raises(ValueError, match="other tensors"):
        encode_masters(old, {"b": old["a"]})
    with pytest.raises(IntegrityError, match="one is a delta of other masters"):
        apply_masters({"a": torch.randn(51)}, blob, "one")
    for damaged in (b"", blob[:30], blob.replace(b"sprawl-masters-1", b"sprawl-masters-9"), blob[:-5] + b"00000"):
        with pytest.raises(IntegrityError, match="one"):
            apply_masters(clone_state(old), damaged, "one")


class Run:
    """Checkpoints of a training run by one process or by three stages, with what the masters were."""

    def __init__(self, run: RunConfig, stages: int = 1) -> None:
        self.config, self.store = run, MemoryStore()
        self.ledger = Ledger(self.store, "r")
        self.trainer = Trainer(make_decoder(), make_decoder(1), run)
        layers = self.trainer.decoder.arch.split(stages)
        self.places = [StagePlace(index, stages, part) for index, part in enumerate(layers)] if stages > 1 else [None]
        self.masters: dict[int, State] = {}
        self.restart()

    def restart(self) -> None:
        """New processes: what they held in memory is gone."""
        plan = DeltaPlan.of(self.config)
        self.writers = [MastersWriter(self.store, self.ledger, plan, place) for place in self.places]

    def write(self, step: int) -> list[Shard]:
        self.trainer.step(step + 1, make_batch(step), None)
        shards = []
        for place, writer in zip(self.places, self.writers, strict=True):
            decoder, optimizer = self.trainer.decoder, self.trainer.optimizer
            if place is not None:
                decoder = stage_decoder(decoder.arch, place)
                load_stage(decoder, dict(self.trainer.decoder.named_parameters()), torch.float32)
                optimizer = make_optimizer(decoder, self.config)
            shard = write_shard(self.store, "r", step, decoder, optimizer, None, place, writer)
            shards.append(Shard.from_message(shard.to_message()))
        self.masters[step] = clone_state({n: p.detach() for n, p in self.trainer.decoder.named_parameters()})
        return shards

    def checkpoint(self, step: int) -> None:
        commit_checkpoint(self.ledger, step, 1, self.write(step))

    def bases(self, step: int) -> set[int]:
        return bases_of(self.ledger, step)

    def key(self, step: int, name: str = "masters") -> str:
        """Of a committed blob."""
        record = self.ledger.checkpoint(step)
        assert record is not None
        return keys.checkpoint_blob("r", step, name, record.blobs[name])


@pytest.mark.parametrize("stages", [1, 3])
def test_every_checkpoint_is_read_to_the_bit_and_resumes(stages: int) -> None:
    """By one process or by several, each with its own chain; after a restart in between, with the same chain."""
    run = Run(config(), stages)
    for step in (0, 2, 4, 6, 8, 10, 12, 14):
        if step in (6, 8):
            run.restart()
        run.checkpoint(step)
    assert [run.bases(step) for step in (0, 2, 4, 6, 8, 10, 12, 14)] == [set(), {0}, {0}, {4}, {4}, {8}, set(), {12}]
    for step, masters in run.masters.items():
        assert equal(read_blob(run.store, run.ledger, step, "masters"), masters)
        record = run.ledger.checkpoint(step)
        assert record is not None
        assert len(record.masters) == stages
        whole = sum(tensor.nbytes for tensor in masters.values())
        assert sum(about.whole_bytes for about in record.masters.values()) == whole
        size = sum(len(run.store.get(run.key(step, name))) for name in record.masters)
        assert size > whole if step in (0, 12) else size < 0.9 * whole
    if stages > 1:
        for place in run.places:
            assert place is not None
            decoder = stage_decoder(run.trainer.decoder.arch, place)
            shapes = {name: p.shape for name, p in decoder.named_parameters()}
            load_stage(decoder, {name: torch.zeros(shape) for name, shape in shapes.items()}, torch.float32)
            optimizer = make_optimizer(decoder, run.config)
            restore(run.store, run.ledger, 10, decoder, optimizer, None, place)
            assert all(torch.equal(p, run.masters[10][name]) for name, p in decoder.named_parameters())


def test_a_reader_that_holds_the_base_fetches_the_delta_only() -> None:
    run = Run(config(whole_every=9))
    for step in (0, 2, 4, 6, 8):
        run.checkpoint(step)
    reader = MastersReader(run.store, run.ledger)
    first = reader.read(4)
    read = reader.bytes_read
    assert equal(reader.read(8), run.masters[8])
    assert reader.bytes_read - read == len(run.store.get(run.key(8)))
    assert equal(first, run.masters[4])  # what was given out is not patched
    assert reader.held == [4, 8]
    reader.hold([8, 12])
    assert reader.held == [8]


def test_a_lost_or_damaged_chain_is_one_clear_line() -> None:
    run = Run(config(whole_every=9))
    for step in (0, 4, 8):
        run.checkpoint(step)
    key = run.key(4)
    kept = run.store.get(key)
    run.store.delete(key)
    with pytest.raises(IntegrityError, match="checkpoint 4/masters of run r cannot be read: its bytes are gone"):
        read_blob(run.store, run.ledger, 8, "masters")
    run.store.put(key, kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="checkpoint 4/masters: digest"):
        read_blob(run.store, run.ledger, 8, "masters")
    delete_checkpoint(run.store, "r", 4)
    with pytest.raises(IntegrityError, match="8/masters of run r cannot be read: it is a delta against checkpoint 4"):
        read_blob(run.store, run.ledger, 8, "masters")
    with pytest.raises(BoardError, match="no checkpoint of step 6"):
        read_blob(run.store, run.ledger, 6, "masters")


def test_a_base_of_other_bits_is_found_out() -> None:
    """Even where every digest fits: the chain has to end in the masters that were committed."""
    run, other = Run(config()), Run(config())
    other.trainer.step(1, make_batch(9), None)
    for step in (0, 4):
        run.checkpoint(step)
        other.checkpoint(step)
    for key in (keys.checkpoint("r", 0), other.key(0)):
        run.store.put(key, other.store.get(key))
    with pytest.raises(IntegrityError, match=r"belong|does not end in the committed masters"):
        read_blob(run.store, run.ledger, 4, "masters")


def test_a_writer_never_builds_on_what_was_not_committed(caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint whose commit failed and is written again; one that never came; a base that is damaged."""
    run = Run(config(whole_every=9))
    run.checkpoint(0)
    run.write(4)
    run.checkpoint(4)
    assert run.bases(4) == {0}
    assert equal(read_blob(run.store, run.ledger, 4, "masters"), run.masters[4])
    run.write(8)
    run.checkpoint(10)  # 8 was to be its base
    assert run.bases(10) == set()
    run.restart()
    run.store.put(run.key(4), b"damaged")
    with caplog.at_level(logging.WARNING):
        run.checkpoint(6)
    assert run.bases(6) == set()
    assert "written whole" in caplog.text
    assert equal(read_blob(run.store, run.ledger, 6, "masters"), run.masters[6])


def test_retention_respects_chains() -> None:
    bases = {0: set(), 2: {0}, 4: {0}, 6: {4}, 8: {4}, 10: {8}, 12: set(), 14: {12}}
    assert surplus(bases, 1, (), bases.__getitem__) == [10, 8, 6, 4, 2, 0]
    assert surplus(bases, 3, (), bases.__getitem__) == [6, 2]
    assert surplus(bases, 1, (4, 99), bases.__getitem__) == [10, 8, 6, 2]
    assert surplus(bases, 99, (), bases.__getitem__) == []
    for keep in range(1, 9):
        left = set(bases)
        for gone in surplus(bases, keep, (), bases.__getitem__):
            left.remove(gone)
            assert all(bases[step] <= left for step in left)  # no delta without its base, at any moment
