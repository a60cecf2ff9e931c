"""Checkpoints of one process and of many: either restores the other, to the bit."""

from __future__ import annotations

import pytest
import torch

from sprawl.board.keys import checkpoint_blob
from sprawl.board.ledger import Ledger
from sprawl.board.store import MemoryStore
from sprawl.errors import BoardError, IntegrityError
from sprawl.policy import Architecture, Decoder
from sprawl.policy.stage import StagePlace, load_stage, stage_decoder
from sprawl.train.checkpoint import (
    commit_checkpoint,
    delete_checkpoint,
    read_blob,
    restore,
    save_checkpoint,
    write_shard,
)
from sprawl.train.codecs import QuantizedPrfCodec
from sprawl.train.optimizer import RunOptimizer, optimizer_tensors
from sprawl.train.trainer import Trainer, make_optimizer
from tests.train.helpers import HF_CONFIG, make_batch, make_config, make_decoder

CONFIG = make_config(boundary={"codec": "quantized-prf", "ratio": 0.25}, policy={"base": "unused", "stages": 3})


def trained(tied: bool, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setitem(HF_CONFIG, "tie_word_embeddings", tied)
    trainer = Trainer(make_decoder(), make_decoder(1), CONFIG)
    for step in (1, 2):
        trainer.step(step, make_batch(step), None)
    return trainer


Stage = tuple[StagePlace, Decoder, RunOptimizer, QuantizedPrfCodec]


def empty_stages(arch: Architecture) -> list[Stage]:
    found: list[Stage] = []
    for index, layers in enumerate(arch.split(3)):
        place = StagePlace(index, 3, layers)
        decoder = stage_decoder(arch, place)
        load_stage(decoder, dict(Decoder(arch).named_parameters()), torch.float32)
        found.append((place, decoder, make_optimizer(decoder, CONFIG), QuantizedPrfCodec(0, 0.25, 3)))
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_whole_to_stages_to_whole(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, store = trained(tied, monkeypatch), MemoryStore()
    ledger = Ledger(store, "r")
    save_checkpoint(store, ledger, 2, 1, trainer.decoder, trainer.optimizer, trainer.codec)
    assert set(ledger.checkpoint(2).blobs) == {"masters", "optimizer", "codec"}  # type: ignore[union-attr]
    stages = empty_stages(trainer.decoder.arch)
    for place, decoder, optimizer, codec in stages:
        restore(store, ledger, 2, decoder, optimizer, codec, place)
    shards = [write_shard(store, "r", 4, *stage[1:], stage[0]) for stage in stages]
    assert ledger.checkpoint(4) is None  # nothing is a checkpoint before the record
    commit_checkpoint(ledger, 4, 1, shards)

    again = Trainer(make_decoder(3), make_decoder(1), CONFIG)
    restore(store, ledger, 4, again.decoder, again.optimizer, again.codec)
    for name, parameter in trainer.decoder.named_parameters():
        assert torch.equal(dict(again.decoder.named_parameters())[name], parameter), name
    expected = optimizer_tensors(trainer.decoder, trainer.optimizer)
    found = optimizer_tensors(again.decoder, again.optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert again.codec.state().keys() == trainer.codec.state().keys()
    assert all(torch.equal(again.codec.state()[key], value) for key, value in trainer.codec.state().items())
    # A stage reads its own shards again; a copy of a tied embedding comes from the first stage's.
    for place, decoder, optimizer, codec in empty_stages(trainer.decoder.arch):
        restore(store, ledger, 4, decoder, optimizer, codec, place)
        for name, parameter in decoder.named_parameters():
            assert torch.equal(parameter, dict(trainer.decoder.named_parameters())[name]), name


def test_every_piece_of_codec_state_is_held_by_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = trained(False, monkeypatch).codec
    names = codec.state()
    assert len(names) == 8  # two boundaries, two directions, two sides
    assert all(sum(codec.held_by(name, stage) for stage in range(3)) == 1 for name in names)
    assert [sum(codec.held_by(name, stage) for name in names) for stage in range(3)] == [2, 4, 2]


def test_missing_damaged_and_deleted_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, store = trained(False, monkeypatch), MemoryStore()
    ledger = Ledger(store, "r")
    with pytest.raises(BoardError, match="no checkpoint of step 2"):
        read_blob(store, ledger, 2, "masters")
    stages = empty_stages(trainer.decoder.arch)
    shards = [write_shard(store, "r", 2, *stage[1:], stage[0]) for stage in stages]
    commit_checkpoint(ledger, 2, 1, shards)
    with pytest.raises(IntegrityError, match="has no codec"):
        read_blob(store, ledger, 2, "codec")
    key = checkpoint_blob("r", 2, "masters-1of3", shards[1].blobs["masters-1of3"])
    store.put(key, store.get(key)[:-1] + b"\0")
    with pytest.raises(IntegrityError, match="checkpoint 2/masters-1of3"):
        read_blob(store, ledger, 2, "masters")
    delete_checkpoint(store, "r", 2)
    assert not list(store.list("r/checkpoints/"))


def test_a_zombie_cannot_replace_the_blobs_of_a_committed_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old writer had looked for the record before it was stopped; it wakes up with other bits and writes on."""
    mine, store = trained(False, monkeypatch), MemoryStore()
    ledger = Ledger(store, "r")
    save_checkpoint(store, ledger, 2, 2, mine.decoder, mine.optimizer, mine.codec)
    zombie = Trainer(make_decoder(7), make_decoder(1), CONFIG)
    shard = write_shard(store, "r", 2, zombie.decoder, zombie.optimizer, zombie.codec)
    commit_checkpoint(ledger, 2, 1, [shard])
    masters = read_blob(store, ledger, 2, "masters")
    assert all(torch.equal(masters[name], parameter) for name, parameter in mine.decoder.named_parameters())
    delete_checkpoint(store, "r", 2)
    assert not store.list("r/checkpoints/")  # the zombie's blobs went too


def test_checkpoints_of_older_releases_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, store = trained(False, monkeypatch), MemoryStore()
    ledger = Ledger(store, "r")
    save_checkpoint(store, ledger, 2, 1, trainer.decoder, trainer.optimizer, trainer.codec)
    for name, digest in ledger.checkpoint(2).blobs.items():  # type: ignore[union-attr]
        store.put(checkpoint_blob("r", 2, name), store.get(checkpoint_blob("r", 2, name, digest)))
        store.delete(checkpoint_blob("r", 2, name, digest))
    masters = read_blob(store, ledger, 2, "masters")
    assert all(torch.equal(masters[name], parameter) for name, parameter in trainer.decoder.named_parameters())
