import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.delta import peak_extra
from sprawl.delta import container, scan, segment
from sprawl.delta.bits import BITS
from sprawl.delta.codec import Encoded, Overwrites, apply, decode, decode_whole, encode, encode_whole, scatter_on_device
from sprawl.delta.state import State, clone_state, root_digest, tensor_digests
from sprawl.errors import IntegrityError

DTYPES = sorted(BITS, key=str)
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (40, 25)]


def root(state: State) -> str:
    return root_digest(tensor_digests(state))


def random_bits(rng: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bit pattern of the dtype: NaN payloads, infinities, both zeros and denormals included."""
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, count).astype(bool)).reshape(shape)
    data = rng.integers(0, 256, count * BITS[dtype].unsigned.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape) if count else torch.zeros(shape, dtype=dtype)


def perturb(rng: np.random.Generator, tensor: torch.Tensor, share: float) -> torch.Tensor:
    other = random_bits(rng, tensor.dtype, tuple(tensor.shape))
    if tensor.numel() == 0:
        return tensor.clone()
    mask = torch.from_numpy(rng.random(tensor.numel()) < share)
    size = tensor.element_size()
    keep = tensor.reshape(-1).view(torch.uint8).reshape(-1, size)
    take = other.reshape(-1).view(torch.uint8).reshape(-1, size)
    mixed = torch.where(mask.reshape(-1, 1), take, keep)
    return mixed.reshape(-1).view(tensor.dtype).reshape(tensor.shape)


def assert_round_trip(base: State, new: State) -> None:
    before = root(base)
    encoded = encode(base, new)
    overwrites = decode(base, encoded.blob)
    assert root(base) == before, "decode must not touch the base"
    state = clone_state(base)
    apply(state, overwrites)
    assert set(state) == set(new)
    assert root(state) == root(new)
    apply(state, overwrites)
    assert root(state) == root(new), "apply must be idempotent"
    assert encode(base, new).blob == encoded.blob, "bytes must be deterministic"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_round_trip_of_any_bits(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    forms = data.draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=6))
    share = data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    base = {f"t{i}": random_bits(rng, dtype, shape) for i, (dtype, shape) in enumerate(forms)}
    new = {name: perturb(rng, tensor, share) for name, tensor in base.items()}
    for name in data.draw(st.sets(st.sampled_from(sorted(base)), max_size=2)):
        match data.draw(st.sampled_from(["remove", "add", "dtype", "shape"])):
            case "remove":
                del new[name]
            case "add":
                new[f"{name}.added"] = random_bits(rng, torch.bfloat16, (5,))
            case "dtype":
                new[name] = random_bits(rng, torch.float16, tuple(base[name].shape))
            case "shape":
                new[name] = random_bits(rng, base[name].dtype, (11, 3))
    assert_round_trip(base, new)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.02, 0.6])
def test_round_trip_of_large_tensors(dtype: torch.dtype, share: float) -> None:
    rng = np.random.default_rng(3)
    base = {"a": random_bits(rng, dtype, (300, 200)), "b": random_bits(rng, dtype, (5000,))}
    assert_round_trip(base, {name: perturb(rng, tensor, share) for name, tensor in base.items()})


def test_changes_that_a_value_comparison_misses() -> None:
    nan = torch.tensor([0x7FC1, 0x7FC2, -63], dtype=torch.int16).view(torch.bfloat16)
    base = {"zero": torch.zeros(3, dtype=torch.bfloat16), "nan": nan}
    new = {"zero": -base["zero"], "nan": nan.flip(0)}
    encoded = encode(base, new)
    assert encoded.changed == 5  # three signs of zero; the middle NaN stays
    assert_round_trip(base, new)


def test_unsupported_dtypes_are_sent_whole() -> None:
    base = {"c": torch.zeros(4, dtype=torch.complex128)}
    new = {"c": torch.full((4,), 1 + 2j, dtype=torch.complex128)}
    assert encode(base, new).tensors["c"].kind == "whole"
    assert encode(base, base).tensors["c"].kind == "unchanged"
    assert_round_trip(base, new)


def training_like(elements: int, rate: float, seed: int = 0) -> tuple[State, State]:
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(elements, generator=generator) * 0.02
    moved = master + rate * torch.randn(elements, generator=generator)
    return {"w": master.bfloat16()}, {"w": moved.bfloat16()}


def conditional_entropy_bytes(base: State, new: State) -> float:
    """Bytes that no coder which knows only each weight's old exponent can beat on average."""
    old, now = (t["w"].view(torch.int16).numpy().view(np.uint16) for t in (base, new))
    ordered = [np.where(x & 0x8000, ~x, x | 0x8000).astype(np.int64) & 0xFFFF for x in (old, now)]
    steps, classes = ordered[1] - ordered[0], (old >> 7) & 0xFF
    bits = 0.0
    for class_ in np.unique(classes):
        counts = np.unique(steps[classes == class_], return_counts=True)[1]
        bits -= (counts * np.log2(counts / counts.sum())).sum()
    return bits / 8


@pytest.mark.parametrize("rate", [1e-6, 1e-5])
def test_size_is_close_to_the_conditional_entropy(rate: float) -> None:
    base, new = training_like(4_000_000, rate)
    encoded = encode(base, new)
    assert encoded.tensors["w"].kind == "delta"
    assert len(encoded.blob) < 1.06 * conditional_entropy_bytes(base, new)


def test_bytes_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(1)
    base = {f"t{i}": random_bits(rng, dtype, (900, 1000)) for i, dtype in enumerate([torch.bfloat16, torch.uint8] * 3)}
    new = {name: perturb(rng, tensor, 0.1) for name, tensor in base.items()}
    blob = encode(base, new).blob
    assert encode(base, new, threads=3).blob == blob
    one, many = (decode(base, blob, threads=threads) for threads in (1, 3))
    for name, patch in one.patches.items():
        assert (patch.indices == many.patches[name].indices).all()
        assert (patch.values == many.patches[name].values).all()


def test_memory_is_bounded_by_the_changes_not_by_the_state() -> None:
    base, new = training_like(64_000_000, 4e-7)
    size = base["w"].nbytes
    encoded: list[Encoded] = []
    extra = peak_extra(lambda: encoded.append(encode(base, new)))
    if extra == 0:
        pytest.skip("this kernel does not tell the most memory that a process had")
    assert extra < 2 * len(encoded[0].blob) + 51 * (segment.MAX_CHANGED + scan.UNIT // 20) + 2**22 < size // 4
    extra = peak_extra(lambda: decode(base, encoded[0].blob))
    assert extra < 6 * encoded[0].changed + 20 * 2 * segment.MAX_CHANGED + 2**22 < size // 4


def test_what_a_damaged_blob_says_is_never_followed_blindly() -> None:
    """With its digest made right again, as by who means harm: refused, or a patch within the tensors."""
    rng = np.random.default_rng(0)
    base = {"w": training_like(2000, 1e-4)[0]["w"], "codes": random_bits(rng, torch.uint8, (500,))}
    new = {name: perturb(rng, tensor, 0.05) for name, tensor in base.items()}
    header, payload = container.unpack(encode(base, new).blob, "d")
    refused = 0
    for place in range(len(payload)):
        flipped = bytearray(payload)
        flipped[place] ^= 1 << rng.integers(8)
        try:
            found = decode(base, container.pack(header, [bytes(flipped)]))
        except IntegrityError:
            refused += 1
        else:
            assert all(int(p.indices.max()) < base[name].numel() for name, p in found.patches.items())
    assert refused > len(payload) // 3
    segment = header["segments"][0]
    piece = segment["pieces"][0]
    for change in (
        {"size": segment["size"] + 1},
        {"gaps": -1},
        {"gaps": "x"},
        {"joined": [[5, 2]]},
        {"classes": []},
        {"classes": [[10**6, 3]]},
        {"classes": segment["classes"] * 2},
        {"pieces": [[0, 0, 10**9, [1]]]},
        {"pieces": [[7, *piece[1:]]]},
        {"pieces": [[*piece[:3], [-1]]]},
        {"pieces": [[*piece[:3], [10**9]]]},
        {"pieces": []},
    ):
        damaged = {**header, "segments": [{**segment, **change}, *header["segments"][1:]]}
        with pytest.raises(IntegrityError, match="the-blob"):
            decode(base, container.pack(damaged, [bytes(payload)]), name="the-blob")


def test_a_tensor_on_a_device_is_written_where_it_is() -> None:
    base, new = training_like(3000, 1e-4)
    patch = decode(base, encode(base, new).blob).patches["w"]
    scatter_on_device(base["w"], patch)
    assert root(base) == root(new)


def test_a_tensor_that_changed_entirely_is_sent_whole_only_when_smaller() -> None:
    base, close = training_like(50_000, 3e-3)
    assert encode(base, close).tensors["w"].kind == "delta"
    constant = {"w": torch.ones_like(base["w"])}
    assert encode(base, constant).tensors["w"].kind == "whole"
    assert_round_trip(base, constant)


def test_many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "UNIT", 37)
    monkeypatch.setattr(segment, "MAX_ELEMENTS", 100)
    rng = np.random.default_rng(0)
    base = {f"t{i}": random_bits(rng, torch.bfloat16, (60,)) for i in range(7)}
    assert_round_trip(base, {name: perturb(rng, tensor, 0.2) for name, tensor in base.items()})


def test_tensors_beyond_32_bit_positions_are_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from sprawl.delta import draft

    monkeypatch.setattr(draft, "LIMIT", 10)
    base, new = training_like(11, 1e-2)
    assert encode(base, new).tensors["w"].kind == "whole"
    assert_round_trip(base, new)
    assert segment.LIMIT == 2**32 - 1


@settings(max_examples=40, deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_by_name(position: float, bit: int) -> None:
    base, new = training_like(3000, 1e-4)
    blob = bytearray(encode(base, new).blob)
    blob[int(position * len(blob))] ^= 1 << bit
    with pytest.raises(IntegrityError, match="blobs/7/abc"):
        decode(base, bytes(blob), name="blobs/7/abc")


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1, exclude_max=True))
def test_a_truncated_blob_is_refused_by_name(share: float) -> None:
    base, new = training_like(3000, 1e-4)
    blob = encode(base, new).blob
    with pytest.raises(IntegrityError, match="blobs/7/abc"):
        decode(base, blob[: int(share * len(blob))], name="blobs/7/abc")


def test_another_base_is_refused_or_harmless() -> None:
    base, new = training_like(3000, 1e-4)
    blob = encode(base, new).blob
    for wrong in ({"v": base["w"]}, {"w": base["w"].float()}, {"w": base["w"][:100].clone()}, {}):
        with pytest.raises(IntegrityError):
            decode(wrong, blob)
    constant = {"w": torch.ones_like(base["w"])}
    with pytest.raises(IntegrityError):
        decode(constant, blob)


def test_apply_keeps_memory_so_that_an_engine_sees_the_new_values() -> None:
    base, new = training_like(3000, 1e-4)
    state = clone_state(base)
    pointer = state["w"].data_ptr()
    apply(state, decode(base, encode(base, new).blob))
    assert state["w"].data_ptr() == pointer
    apply(state, Overwrites(whole={"w": base["w"]}))
    assert state["w"].data_ptr() == pointer
    assert root(state) == root(base)


def test_keyframes_are_plain_safetensors() -> None:
    from safetensors.torch import load

    state = {"a": torch.randn(3, 4).bfloat16(), "s": torch.tensor(2.0), "e": torch.zeros(0, 3)}
    blob = encode_whole(state)
    assert root(load(blob)) == root(state) == root(decode_whole(blob))
    with pytest.raises(IntegrityError, match="the-blob"):
        decode_whole(blob[:-1], "the-blob")
