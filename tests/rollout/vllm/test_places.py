"""Where changed elements go, found by watching loaders that fuse, shard, pad and tie as vLLM's do."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sprawl.delta.codec import Overwrites, apply
from sprawl.delta.journal import pack_overwrites
from sprawl.delta.segment import Patch
from sprawl.delta.state import State, clone_state
from sprawl.rollout.vllm.places import Unplaced, watch
from sprawl.rollout.vllm.staging import Home, stage

HEADS, HIDDEN, WIDE, VOCAB = 8, 12, 20, 21


class Shard:
    """What one of `ranks` tensor-parallel workers makes of a checkpoint: q, k, v fused by rows, the projection behind
    them cut by columns, the vocabulary cut by rows and padded, the head tied, one matrix transposed, one bias fp32."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        rows, self.vocab = HEADS // ranks, -(-VOCAB // ranks)
        self.qkv = torch.zeros(3 * rows, HIDDEN, dtype=torch.bfloat16)
        self.out = torch.zeros(HIDDEN, WIDE // ranks, dtype=torch.bfloat16)
        self.embed = torch.zeros(self.vocab + 3, HIDDEN, dtype=torch.bfloat16)
        self.turned = torch.zeros(WIDE, HIDDEN, dtype=torch.bfloat16)
        self.norm = torch.zeros(HIDDEN)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return {loaded for name, tensor in weights for loaded in self._load(name, tensor)}

    def _load(self, name: str, tensor: Tensor) -> list[str]:
        if name in ("q", "k", "v"):
            rows = HEADS // self.ranks
            at = "qkv".index(name) * rows
            self.qkv.narrow(0, at, rows).copy_(tensor.narrow(0, self.rank * rows, rows))
            return ["qkv"]
        if name == "embed":
            first = self.rank * self.vocab
            part = tensor[first : first + self.vocab]
            self.embed[: len(part)].copy_(part)
            self.embed[len(part) :].fill_(0)
            return ["embed"]
        if name == "out":
            wide = WIDE // self.ranks
            self.out.copy_(tensor.narrow(1, self.rank * wide, wide))
        elif name == "turned":
            self.turned.copy_(tensor.t())
        elif name == "norm":
            self.norm.copy_(tensor)
        elif name == "scale":
            self.scale = float(tensor)
        return [] if name == "head" else [name]

    def parameters(self) -> list[Tensor]:
        return [self.qkv, self.out, self.embed, self.turned, self.norm]


def checkpoint() -> State:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        **dict.fromkeys("qkv", (HEADS, HIDDEN)),
        "out": (HIDDEN, WIDE),
        "embed": (VOCAB, HIDDEN),
        "head": (VOCAB, HIDDEN),
        "turned": (HIDDEN, WIDE),
        "norm": (HIDDEN,),
        "scale": (),
    }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def overwrites(state: State, seed: int) -> Overwrites:
    """Some elements of every tensor, and all of two."""
    random = np.random.default_rng(seed)
    patches = {}
    for name, tensor in state.items():
        if name in ("v", "out", "scale"):
            continue
        indices = random.permutation(tensor.numel())[: 1 + tensor.numel() // 3].astype(np.uint32)
        values = torch.randn(len(indices), generator=torch.Generator().manual_seed(seed)).bfloat16()
        patches[name] = Patch(indices, values.view(torch.int16).numpy().view(np.uint16))
    return Overwrites(patches, {name: torch.randn_like(state[name]) for name in ("v", "out")})


def staged(folder: Path, model: Shard, state: State, step: Overwrites):
    (folder / "sprawl.json").write_text('{"root_digest": "a"}')
    (folder / "sprawl.journal").write_bytes(b"".join(pack_overwrites(step, {"root_digest": "b"})))
    homes = {name: Home(state[name].dtype, tuple(state[name].shape), p) for name, p in watch_all(model, state).items()}
    found = stage(folder, "a", "b", homes)
    assert found.done.wait(10)
    return found


def watch_all(model: Shard, state: State):
    return watch(model.load_weights, state)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_written_in_place_is_loaded(ranks: int, tmp_path: Path) -> None:
    state = checkpoint()
    step = overwrites(state, 1)
    following = clone_state(state)
    apply(following, step)
    for rank in range(ranks):
        model, wanted = Shard(rank, ranks), Shard(rank, ranks)
        model.load_weights(state.items())
        wanted.load_weights(following.items())
        before = [tensor.clone() for tensor in model.parameters()]
        found = staged(tmp_path, model, state, step)
        assert [found.leads(*way) for way in ("ab", "ac", "bb")] == [True, False, False]
        assert all(torch.equal(old, now) for old, now in zip(before, model.parameters(), strict=True))
        found.write()
        found.write()
        assert all(torch.equal(a, b) for a, b in zip(wanted.parameters(), model.parameters(), strict=True))


def test_what_has_no_place_is_not_staged(tmp_path: Path) -> None:
    """A scalar is loaded by other means than copying; another journal, another base, a damaged one lead nowhere."""
    state = checkpoint()
    model = Shard(0, 1)
    model.load_weights(state.items())
    places = watch_all(model, state)
    assert "scale" not in places
    assert places["head"] == []
    change = Overwrites({"scale": Patch(np.zeros(1, np.uint32), np.zeros(1, np.uint16))})
    assert "no place is known for scale" in staged(tmp_path, model, state, change).why
    other = Overwrites({}, {"norm": torch.zeros(HIDDEN, dtype=torch.float64)})
    assert "another form" in staged(tmp_path, model, state, other).why
    assert "whole" in staged(tmp_path, model, state, Overwrites()).why
    assert not staged(tmp_path, model, state, overwrites(state, 2)).why
    wrong = stage(tmp_path, "x", "b", {})
    assert wrong.done.wait(10)
    assert "leads from a to b" in wrong.why
    assert not wrong.leads("x", "b")
    journal = tmp_path / "sprawl.journal"
    journal.write_bytes(journal.read_bytes()[:-1])
    torn = stage(tmp_path, "a", "b", {})
    assert torn.done.wait(10)
    assert "not an intact journal" in torn.why


def test_watching_writes_nothing_and_ends() -> None:
    state = checkpoint()
    model = Shard(0, 1)
    pieces = watch_all(model, state)
    assert not any(tensor.any() for tensor in model.parameters())
    assert not pieces["q"][0].holds(state["q"])
    model.load_weights(state.items())
    assert all(piece.holds(state[name]) for name in pieces for piece in pieces[name])
    model.turned[3, 2] += 1
    assert not pieces["turned"][0].holds(state["turned"])


def test_other_threads_copy_meanwhile() -> None:
    state, copied = checkpoint(), torch.zeros(3)

    def load(weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        thread = threading.Thread(target=lambda: copied.copy_(torch.ones(3)))
        thread.start()
        thread.join()
        return []

    assert watch(load, state) == {name: [] for name in state}
    assert copied.all()


@pytest.mark.parametrize(
    "source",
    [
        lambda tensor: tensor * 1,  # computed
        lambda tensor: tensor.float(),
        lambda tensor: tensor[:1].expand(HEADS, HIDDEN),  # one element in several places
        lambda tensor: tensor.view(torch.int16),
    ],
)
def test_a_loader_that_computes_cannot_be_followed(source) -> None:
    target = torch.zeros(HEADS, HIDDEN)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            target.copy_(source(tensor))

    state = {"q": checkpoint()["q"]}
    with pytest.raises(Unplaced):
        watch(load, state)
    target.copy_(state["q"])  # the real one again
    assert torch.equal(target, state["q"].float())
