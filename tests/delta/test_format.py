"""The format as docs/protocol.md has it: a decoder written from that page, slow and obvious, reads what we write."""

import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from blake3 import blake3

from sprawl.delta.codec import encode
from sprawl.delta.state import State, raw_bytes
from tests.delta.test_codec import perturb, random_bits, training_like

FLOATS = {"bfloat16": (16, 8, 7), "float16": (16, 5, 10), "float32": (32, 8, 23), "float8_e4m3fn": (8, 4, 3)}


class Stream:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def leb(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.take("B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value


def tokens(stream: Stream, count: int) -> Iterator[int]:
    low, more = stream.take("BB")
    slots = [(token, f, o) for token in range(low, low + more + 1) for f in [stream.leb()] for o in range(f)]
    assert len(slots) == 4096
    words = stream.leb()
    states = list(stream.take("4I"))
    words = iter(stream.take(f"{words}H"))
    for i in range(count):
        x = states[i % 4]
        token, frequency, offset = slots[x & 4095]
        x = frequency * (x >> 12) + offset
        states[i % 4] = x << 16 | next(words) if x < 2**15 else x
        yield token
    assert states == [2**15] * 4
    assert next(words, None) is None


def numbers(data: bytes, counts: list[int]) -> list[int]:
    stream = Stream(data)
    raw = int.from_bytes(b"".join(struct.pack("<I", word) for word in stream.take(f"{stream.take('I')[0]}I")), "little")
    found: list[int] = []
    class_ = 0
    while class_ < len(counts):
        size = stream.leb()
        for token in tokens(stream, sum(counts[class_ : class_ + size])):
            number = token
            if token >= 16:
                bits = (token - 16) // 4 + 2
                number = (4 | token % 4) << bits | raw & ((1 << bits) - 1)
                raw >>= bits
            found.append(number)
        class_ += size
    assert stream.at == len(data)
    return found


def segment_values(
    segment: dict[str, Any], tensors: list[list[Any]], state: dict[str, np.ndarray], data: bytes
) -> None:
    """Write a segment's new values into `state`: unsigned arrays of elements, or of bytes where packed."""
    name, dtype, _ = tensors[segment["pieces"][0][0]]
    packed = segment["packed"]
    width, exponent, mantissa = (4, 3, 0) if packed else FLOATS.get(dtype, (8 * state[name].itemsize, 0, 0))
    sign = 1 << (width - 1) if dtype in FLOATS or (packed and dtype == "uint8") else 0
    classes: dict[int, int] = {}
    joined = {key: first for first, last in segment["joined"] for key in range(first, last + 1)}
    for key in range(1 << exponent):
        classes[key] = len({joined.get(k, k) for k in range(key + 1)}) - 1
    counts = [n for _, n in segment["classes"]]
    gaps = [n + 1 for n in numbers(data[: segment["gaps"]], counts)]
    steps = [(n // 2 + 1) * (1 if n % 2 else -1) for n in numbers(data[segment["gaps"] :], counts)]
    moves: dict[int, dict[int, int]] = {}
    at = 0
    for class_, n in segment["classes"]:
        ranks = np.cumsum(gaps[at : at + n]) - 1
        moves[class_] = dict(zip(ranks.tolist(), steps[at : at + n], strict=True))
        at += n
    rank = dict.fromkeys(range(1 << exponent), -1)
    for place, start, stop, changed in segment["pieces"]:
        target = state[tensors[place][0]]
        for half, expected in enumerate(changed):
            for i in range(start, stop):
                word = int(target[i])
                x = word >> 4 * half & 15 if packed else word
                class_ = classes[x >> mantissa & (1 << exponent) - 1 if exponent else 0]
                rank[class_] += 1
                if rank[class_] not in moves.get(class_, {}):
                    continue
                full = (1 << width) - 1
                order = (~x & full if x & sign else x | sign) if sign else x
                order = (order + moves[class_][rank[class_]]) & full
                new = (order ^ sign if order & sign else ~order & full) if sign else order
                target[i] = word & ~(15 << 4 * half) & 255 | new << 4 * half if packed else new
                expected -= 1
            assert expected == 0


def slow_decode(base: State, blob: bytes) -> dict[str, bytes]:
    """The bytes of every tensor after the delta."""
    (size,) = struct.unpack("<Q", blob[:8])
    table = json.loads(blob[8 : 8 + size])
    digest = table["__metadata__"]["blake3"]
    assert table["__metadata__"]["version"] == "2"
    assert blake3(blob.replace(digest.encode(), b"0" * 64, 1)).hexdigest() == digest
    parts = [blob[8 + size :][slice(*table[name]["data_offsets"])] for name in ("header", "payload")]
    header, payload = json.loads(zstandard.ZstdDecompressor().decompress(parts[0])), parts[1]
    state = {name: raw_bytes(tensor).tobytes() for name, tensor in base.items() if name not in header["removed"]}
    at = 0
    for segment in header["segments"]:
        arrays = {}
        for place, *_ in segment["pieces"]:
            name, _, _ = header["tensors"][place]
            words = 1 if segment["packed"] else base[name].element_size()
            arrays[name] = np.frombuffer(bytearray(state[name]), f"u{words}")
        segment_values(segment, header["tensors"], arrays, payload[at : at + segment["size"]])
        state |= {name: array.tobytes() for name, array in arrays.items()}
        at += segment["size"]
    for item in header["whole"]:
        pieces = []
        for length in item["frames"]:
            planes = zstandard.ZstdDecompressor().decompress(payload[at : at + length])
            width = getattr(torch, item["dtype"]).itemsize
            pieces.append(np.frombuffer(planes, np.uint8).reshape(width, -1).T.tobytes())
            at += length
        state[item["name"]] = b"".join(pieces)
    assert at == len(payload)
    return state


@pytest.mark.parametrize("share", [0.003, 0.2])
def test_a_decoder_written_from_the_page_reads_it(share: float) -> None:
    rng = np.random.default_rng(0)
    kinds = {
        "f32": torch.float32,
        "fp8": torch.float8_e4m3fn,
        "f16": torch.float16,
        "u8": torch.uint8,
        "i32": torch.int32,
    }
    base = {name: random_bits(rng, dtype, (70, 30)) for name, dtype in kinds.items()}
    base["counts"] = torch.arange(500, dtype=torch.int16)
    new = {name: perturb(rng, tensor, share) for name, tensor in base.items()}
    for name, rate in (("bf16", 1e-5), ("other", 3e-3)):
        base[name], new[name] = (state["w"] for state in training_like(4000, rate))
    base["gone"], new["come"] = torch.ones(3), torch.ones(4)
    assert slow_decode(base, encode(base, new).blob) == {name: raw_bytes(t).tobytes() for name, t in new.items()}
