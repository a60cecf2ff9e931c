"""The sizing table: models of public shapes, islands, the board's bandwidth, and how late a version arrives."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sprawl.plan.estimate import delta_bytes
from sprawl.plan.size import size_of
from sprawl.policy.architecture import Architecture

_QWEN = Architecture(
    family="qwen2",
    vocab=151_936,
    hidden=1536,
    intermediate=8960,
    layers=28,
    heads=12,
    kv_heads=2,
    head_dim=128,
    norm_eps=1e-6,
    rope_theta=1e4,
    tied=True,
    qkv_bias=True,
    output_bias=False,
    qk_norm=False,
    max_positions=4096,
)
_LLAMA = replace(_QWEN, family="llama", vocab=128_256, heads=64, kv_heads=8, tied=False, qkv_bias=False)
SHAPES = {
    "0.1B": replace(
        _LLAMA, vocab=49_152, hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, head_dim=64, tied=True
    ),
    "1.5B": _QWEN,
    "7B": replace(_QWEN, vocab=152_064, hidden=3584, intermediate=18_944, layers=28, heads=28, kv_heads=4, tied=False),
    "32B": replace(_QWEN, vocab=152_064, hidden=5120, intermediate=27_648, layers=64, heads=40, kv_heads=8, tied=False),
    "70B": replace(_LLAMA, hidden=8192, intermediate=28_672, layers=80),
}
"""Shapes of SmolLM2-135M, Qwen2.5-1.5B, -7B and -32B, Llama-3.1-70B."""

ISLAND_RATE = 1.25e8  # bytes a second that one island's download gets at most: 1 Gbit/s


@dataclass(frozen=True)
class Row:
    """`latency_s`: from the commit until the last island has the version; `keyframe_s`: the same of a whole version.
    With a mirror in the islands' region the board sends each version once."""

    model: str
    served: str
    islands: int
    board_gbit: float
    served_bytes: int
    delta_bytes: int
    latency_s: float
    keyframe_s: float
    mirrored_s: float


def sizing(
    served: str = "bfloat16",
    changed: float = 0.01,
    islands: tuple[int, ...] = (2, 16, 128),
    board_gbit: tuple[float, ...] = (1.0, 10.0),
    publish_gbit: float = 10.0,
) -> list[Row]:
    """A version is put on the board at `publish_gbit`, then read by all islands at once over the board's link."""
    rows = []
    for model, arch in SHAPES.items():
        size = size_of(arch, 1)
        delta, whole = delta_bytes(size, served, changed), size.served_bytes(served)

        def until_all(count: int, board: float, payload: int) -> float:
            rate = min(ISLAND_RATE, board * 1e9 / 8 / count)
            return payload / (publish_gbit * 1e9 / 8) + payload / rate

        for count in islands:
            for board in board_gbit:
                rows.append(
                    Row(
                        model,
                        served,
                        count,
                        board,
                        whole,
                        delta,
                        until_all(count, board, delta),
                        until_all(count, board, whole),
                        until_all(1, board, delta) + delta / ISLAND_RATE,
                    )
                )
    return rows
