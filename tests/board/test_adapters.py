"""Adapters on a board: every version whole, followed and checked like any other."""

import torch

from sprawl.board.reader import VersionReader
from sprawl.board.retention import gc
from sprawl.board.store import Store
from sprawl.board.verify import verify_board
from sprawl.delta.state import State, tensor_digests
from sprawl.delta.views import adapter_view
from tests.board.states import RUN, publisher

MODULE = "model.layers.0.self_attn.q_proj"


def adapter(version: int) -> State:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 32, generator=generator), torch.randn(16, 4, generator=generator)
    return adapter_view({f"{MODULE}.lora_A.weight": a, f"{MODULE}.lora_B.weight": b + 1e-3 * version})


def test_every_version_is_whole_and_can_be_followed(store: Store) -> None:
    writer = publisher(store, keyframe_every=20)
    for version in range(4):
        writer.publish(version, version, adapter(version))

    reader = VersionReader(store, RUN)
    served = reader.materialise(0)
    for version in range(4):
        manifest = reader.manifest(version)
        assert manifest is not None
        assert (manifest.kind, manifest.base_version, manifest.keyframe_version) == ("keyframe", None, version)
        assert [blob.role for blob in manifest.blobs].count("delta") == 0
        if version:
            reader.advance(served, version)
        assert served.digests == tensor_digests(adapter(version))
    assert reader.files()["config.json"]

    report = verify_board(store, RUN)
    assert report.ok, report.problems
    assert (report.versions, report.keyframes) == (4, 4)


def test_any_version_can_be_the_oldest_that_is_kept(store: Store) -> None:
    writer = publisher(store, keyframe_every=20)
    for version in range(4):
        writer.publish(version, version, adapter(version))
    assert gc(store, RUN, 2).plan.versions == [0, 1]
    assert VersionReader(store, RUN).materialise(3).digests == tensor_digests(adapter(3))


def test_a_writer_that_took_over_goes_on_with_whole_versions(store: Store) -> None:
    publisher(store, keyframe_every=20).publish(0, 0, adapter(0))
    publisher(store, keyframe_every=20).publish(1, 1, adapter(1))
    assert VersionReader(store, RUN).materialise(1).digests == tensor_digests(adapter(1))
