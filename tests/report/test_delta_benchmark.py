"""The delta benchmark's parts on small states: the keys that others read, and peers that encode what they say."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks import delta
from benchmarks.peers import PEERS, Peer
from benchmarks.versions import adam_steps
from sprawl.delta.bits import integer_view

KEYS = {"size_over_entropy", "size_over_best_peer", "encode_speedup", "apply_speedup", "peak_extra_bytes"}


def test_a_row_of_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    views = ("bf16", "fp8", "nvfp4")
    small = [delta.Case(view, lambda view=view: adam_steps(0.03, 1 << 17, 1 << 17, view)) for view in views]
    monkeypatch.setattr(delta, "cases", lambda *arguments: small)
    result = CliRunner().invoke(delta.delta, ["--quick", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])
    assert [row["case"] for row in rows] == list(views)
    for row in rows:
        assert row.keys() >= KEYS | {"encode_over_compare", "encode_over_memcpy", "two_threads"}
        assert row["bytes"] > row["entropy_bytes"] > 0
        assert all(row[key] > 0 for key in KEYS - {"peak_extra_bytes"})
    assert "x entropy" in delta.markdown(rows)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("view", ["bf16", "fp8"])
def test_peers_round_trip(peer: Peer, view: str) -> None:
    old, new = next(iter(adam_steps(0.03, 1 << 15, 1 << 15, view)))
    for name in new:
        target = integer_view(old[name]).copy()
        peer.apply(target, peer.encode(integer_view(old[name]), integer_view(new[name])))
        assert np.array_equal(target, integer_view(new[name]))


def test_the_bound_is_the_entropy_of_changes_given_the_class() -> None:
    old = {"w": torch.tensor([1.0, 1.0, 1.0, 1.0, 4.0, 4.0]).bfloat16()}
    new = {"w": torch.tensor([1.0, 1.0, 1.0078125, 1.0078125, 4.0, 4.0]).bfloat16()}
    tally = delta.Tally()
    delta.count_steps(tally, old, new)
    assert delta.entropy_bytes(tally) == pytest.approx(4 / 8)  # half of four change alike: a bit each; the rest is sure
