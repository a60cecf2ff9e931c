"""The disk layout of slime, miles and stitch. Fixtures are made by our own code from the documented format."""

import json
import struct
import zlib

import numpy as np
import pytest
import xxhash
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from sprawl.errors import IntegrityError, SprawlError
from sprawl.interop.layout import CHECKSUMS, ENCODINGS, Encoding, Index, Pointer, checksum, decode, encode


@given(st.binary(max_size=400), st.data(), st.sampled_from(ENCODINGS))
def test_encodings_are_inverse(old: bytes, data: st.DataObject, encoding: Encoding) -> None:
    new = data.draw(st.binary(min_size=len(old), max_size=len(old)))
    before, after = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    assert decode(encoding, before, encode(encoding, before, after, "t"), "t").tobytes() == new


def test_the_bytes_are_the_documented_ones() -> None:
    old = np.array([1, 2, 3, 4, 5], np.uint8)
    new = np.array([1, 9, 3, 4, 7], np.uint8)
    unpack = zstandard.ZstdDecompressor().decompress
    assert unpack(encode("xor", old, new, "t")) == bytes([0, 2 ^ 9, 0, 0, 5 ^ 7])
    assert unpack(encode("overwrite", old, new, "t")) == struct.pack("<III", 2, 1, 4) + bytes([9, 7])
    assert unpack(encode("overwrite", old, old, "t")) == struct.pack("<I", 0)


def test_frames_without_content_size_are_read() -> None:
    old = np.arange(200, dtype=np.uint8)
    compressor = zstandard.ZstdCompressor().compressobj()
    blob = compressor.compress(bytes(200)) + compressor.flush()
    assert (decode("xor", old, blob, "t") == old).all()


def test_checksums_are_the_usual_ones() -> None:
    data = np.arange(200, dtype=np.uint8)
    raw = data.tobytes()
    assert checksum("xxh3-128", data) == xxhash.xxh3_128(raw).hexdigest()
    assert checksum("blake3", data) == blake3(raw).hexdigest()
    assert checksum("adler32", data) == f"{zlib.adler32(raw):08x}"
    assert checksum("adler32", np.empty(0, np.uint8)) == "00000001"
    with pytest.raises(SprawlError, match="md5"):
        checksum("md5", data)


def test_positions_beyond_4_gib_are_refused_not_wrapped() -> None:
    """By arithmetic: an array that claims 4 GiB + 1 bytes without having them."""
    wide = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), ((1 << 32) + 1,), (0,))
    with pytest.raises(SprawlError, match=r"'big'.*32-bit positions"):
        encode("overwrite", wide, wide, "big")


def overwrite(*words: int, values: bytes = b"") -> bytes:
    return zstandard.ZstdCompressor().compress(struct.pack(f"<{len(words)}I", *words) + values)


@pytest.mark.parametrize(
    ("encoding", "blob", "message"),
    [
        ("xor", b"not zstd", "does not decompress"),
        ("xor", zstandard.ZstdCompressor().compress(bytes(3)), "the XOR has 3 bytes, the tensor has 4"),
        ("xor", zstandard.ZstdCompressor().compress(bytes(10**6)), "more than the 4 bytes"),
        ("overwrite", zstandard.ZstdCompressor().compress(b"ab"), "no count"),
        ("overwrite", overwrite(2, 0, values=b"x"), "announces 2 positions"),
        ("overwrite", overwrite(1, 4, values=b"x"), "reaches byte 4"),
        ("overwrite", overwrite(2**32 - 1, 0, values=b"x"), "announces 4294967295"),
    ],
)
def test_damaged_blobs_are_named(encoding: Encoding, blob: bytes, message: str) -> None:
    old = np.zeros(4, np.uint8)
    with pytest.raises(IntegrityError, match=f"tensor 'w'.*{message}"):
        decode(encoding, old, blob, "tensor 'w'")
    assert not old.any()


@pytest.mark.parametrize(
    ("text", "run_id", "version"),
    [("r-1/weight_v000007", "r-1", 7), ("weight_v000007\n", None, 7), ("a/b/weight_v1234567", "a/b", 1234567)],
)
def test_pointers(text: str, run_id: str | None, version: int) -> None:
    pointer = Pointer.parse(text, "latest")
    assert (pointer.run_id, pointer.version) == (run_id, version)
    assert str(pointer) == text.strip()


@pytest.mark.parametrize("text", ["", "weight_v", "run/", "run/weight_vx", "../etc", "\x00"])
def test_an_unreadable_pointer_is_never_version_0(text: str) -> None:
    with pytest.raises(IntegrityError, match="names no version"):
        Pointer.parse(text, "latest")


@pytest.mark.parametrize("kind", CHECKSUMS)
@pytest.mark.parametrize("encoding", [None, *ENCODINGS])
def test_indices_survive_a_round_trip(encoding: Encoding | None, kind: str) -> None:
    index = Index(7, None if encoding is None else 6, encoding, kind, {"w": "a.safetensors"})
    data = index.to_bytes(12)
    metadata = json.loads(data)["metadata"]
    assert metadata["version"] == "000007"
    if encoding is None:
        assert "delta_encoding" not in metadata
    else:
        assert metadata["base_version"] == "000006"
        assert metadata["checksum_format"] == kind
        assert Index.from_bytes(data, "i") == index


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta_encoding": "deltas_zstd"}, "deltas_zstd"),
        ({"compression_format": "lz4"}, "lz4"),
        ({"checksum_format": "sha1"}, "sha1"),
        ({"version": "x"}, "not the index"),
        ({"base_version": None}, "not the index"),
    ],
)
def test_unknown_indices_are_refused(change: dict[str, object], message: str) -> None:
    data = json.loads(Index(7, 6, "xor", "blake3", {"w": "a"}).to_bytes(1))
    data["metadata"] |= change
    with pytest.raises(IntegrityError, match=message):
        Index.from_bytes(json.dumps(data).encode(), "the index")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"metadata": {"version": 1}, "weight_map": {"w": "../x"}}'])
def test_damaged_indices_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="the index"):
        Index.from_bytes(data, "the index")
