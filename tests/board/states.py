"""Small states that move a little from version to version."""

import torch

from sprawl.board.commit import CommitOptions
from sprawl.board.publisher import Publisher
from sprawl.board.store import Store
from sprawl.delta.state import State

RUN = "run-1"
FILES = {"config.json": b'{"model_type": "qwen2"}', "tokenizer.json": b"{}"}


def state_of(version: int, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(40, 50, generator=generator) * 0.02
    for _ in range(version):
        weights += 1e-5 * torch.randn(40, 50, generator=generator)
    return {"w": weights.bfloat16(), "norm": torch.ones(50, dtype=torch.bfloat16), "scale": torch.tensor(1.0 + version)}


def publisher(store: Store, keyframe_every: int = 4, **options: object) -> Publisher:
    return Publisher(store, RUN, CommitOptions(keyframe_every=keyframe_every, dtype="bfloat16", files=FILES, **options))  # type: ignore[arg-type]


def publish(store: Store, versions: int, keyframe_every: int = 4) -> None:
    """Versions 0 .. versions - 1."""
    writer = publisher(store, keyframe_every)
    for version in range(versions):
        writer.publish(version, version, state_of(version))
