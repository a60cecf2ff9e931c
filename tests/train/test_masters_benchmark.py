"""The benchmark of masters as deltas: every column of a row, from masters that moved a little."""

from __future__ import annotations

import torch

from benchmarks.masters import measure, pairs, table


def test_a_row_and_its_table() -> None:
    generator = torch.Generator().manual_seed(0)
    old = {"a": torch.randn(200, 100, generator=generator), "b": torch.randn(500, generator=generator)}
    new = {name: tensor + 1e-4 * torch.randn(tensor.shape, generator=generator) for name, tensor in old.items()}
    row = measure("made up", (10, 20), old, new)
    assert (row.old, row.new, row.distance, row.whole_bytes) == (10, 20, 10, 4 * 20_500)
    assert row.changed > 0.99
    assert 0.3 < row.delta < row.xor_zstd1 < row.whole_zstd3 < row.whole_zstd1 < 1.01
    header, _, line = table([row, row]).splitlines()
    assert line.startswith(f"| made up | 10 | 2 | {row.changed:.1%} | {row.delta:.1%} | {row.xor_zstd1:.1%} |")
    assert header.count("|") == line.count("|")
    assert list(pairs({0: {}, 10: {}, 20: {}})) == [(0, 10), (10, 20), (0, 20)]
