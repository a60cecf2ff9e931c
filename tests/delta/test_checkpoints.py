"""Safetensors read in pieces: what comes back, from where, and what wrong files get."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save, save_file

from sprawl.delta.checkpoints import INDEX, Checkpoint
from sprawl.errors import SprawlError


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    plain = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
    return {
        **{f"f{i}": torch.randn(5, 7).to(dtype) for i, dtype in enumerate(plain)},
        "int": torch.arange(12, dtype=torch.int32).reshape(3, 4),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }


def test_any_range_of_any_dtype_comes_back(tmp_path: Path) -> None:
    state = tensors()
    save_file(state, tmp_path / "model.safetensors")
    for url in (str(tmp_path), str(tmp_path / "model.safetensors"), f"file://{tmp_path}"):
        source = Checkpoint(url)
        assert source.forms.keys() == state.keys()
        for name, tensor in state.items():
            assert (source.forms[name].dtype, source.forms[name].shape) == (tensor.dtype, tuple(tensor.shape))
            flat = tensor.reshape(-1)
            for begin, end in ((0, flat.numel()), (1, 2), (flat.numel() // 2, flat.numel())):
                part = source.read(name, begin, max(begin, end))
                assert part.view(torch.uint8).tolist() == flat[begin:end].view(torch.uint8).tolist(), name


def test_shards_on_any_fsspec_url() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/ck/model-1.safetensors", save({"a": torch.ones(3)}))
    fs.pipe_file("/ck/model-2.safetensors", save({"b": torch.zeros(2)}))
    fs.pipe_file("/ck/consolidated.safetensors", save({"a": torch.ones(3)}))
    with pytest.raises(SprawlError, match="'a' is in more than one shard"):
        Checkpoint("memory://ck")
    fs.pipe_file(
        f"/ck/{INDEX}", json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    )
    source = Checkpoint("memory://ck")
    assert sorted(source.forms) == ["a", "b"], "an index says which files count, as in transformers"
    assert source.read("b", 0, 2).tolist() == [0.0, 0.0]
    fs.rm_file("/ck/model-2.safetensors")
    with pytest.raises(SprawlError, match=r"model-2\.safetensors is missing, its index names it"):
        Checkpoint("memory://ck")
    fs.pipe_file(f"/ck/{INDEX}", b"[]")
    with pytest.raises(SprawlError, match="is not an index"):
        Checkpoint("memory://ck")


def header(entry: dict[str, object], body: bytes = b"") -> bytes:
    text = json.dumps({"t": entry}).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nope",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{",
        header({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, b"1234"),
        header({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, b"1234"),
        header({"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}, b"1234"),
        header({"dtype": "F32", "shape": [1]}, b"1234"),
    ],
)
def test_a_file_that_is_none_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(SprawlError, match=r"bad\.safetensors is not a readable safetensors file: "):
        Checkpoint(str(tmp_path / "bad.safetensors"))


def test_a_file_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(100)}, tmp_path / "m.safetensors")
    source = Checkpoint(str(tmp_path))
    data = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(data[:-4])
    with pytest.raises(SprawlError, match="ends inside tensor 'w'"):
        source.read("w", 0, 100)


@pytest.mark.parametrize(("url", "message"), [("/no/such/model", "no model at"), ("nofs://x", "cannot open nofs://x")])
def test_a_url_that_leads_nowhere_is_named(url: str, message: str) -> None:
    with pytest.raises(SprawlError, match=message):
        Checkpoint(url)
