"""The GPU kernel against the definition: on a GPU where there is one, else in Triton's interpreter, where that is."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from sprawl.train import prf

if find_spec("triton") is None:
    pytest.skip("Triton is not installed (CUDA wheels of torch bring it)", allow_module_level=True)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and the kernel are imported
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("channels", "keep"), [(128, 6), (1536, 77), (33, 33), (7, 1), (1, 1)])
def test_the_kernel_equals_the_definition(channels: int, keep: int) -> None:
    from sprawl.train.prf_triton import fused_channels

    count = 4096 if DEVICE == "cuda" else 12
    sample, position = torch.arange(count) // 16 + 2**40, torch.arange(count) % 16
    for key in (5, 2**64 - 3, prf.derive_key(7, 3, 11)):
        kept = fused_channels(key, sample.to(DEVICE), position.to(DEVICE), channels, keep)
        assert torch.equal(kept.cpu(), prf.reference_channels(key, sample, position, channels, keep))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_masks_and_noise_on_a_gpu_are_those_of_the_cpu() -> None:
    sample, position = torch.arange(4096) // 64, torch.arange(4096) % 64
    kept = prf.channels(11, sample, position, 1536, 77)
    assert torch.equal(prf.channels(11, sample.cuda(), position.cuda(), 1536, 77).cpu(), kept)
    noise = prf.uniform(11, sample, position, kept)
    assert torch.equal(prf.uniform(11, sample.cuda(), position.cuda(), kept.cuda()).cpu(), noise)
