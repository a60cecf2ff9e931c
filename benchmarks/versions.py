"""Pairs of versions to measure deltas on: of a real run, of real steps of the tiny model, and synthetic Adam steps.

Large states are made a group of tensors at a time, so that the fp32 masters never exist at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.delta.state import State, clone_state, served_view

Pair = tuple[State, State]
TINY = Path("configs/base/tiny")
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # magnitudes of e2m1, by code


def from_board(url: str, run_id: str, count: int) -> Iterator[Pair]:
    """The last `count` consecutive pairs of a run on a board. Raises BoardError when there is none."""
    reader = VersionReader(open_store(url), run_id)
    head = reader.head() or 0
    served = reader.materialise(max(0, head - count))
    while served.version < head:
        old = clone_state(served.state)
        reader.advance(served, served.version + 1)
        yield old, clone_state(served.state)


def from_tiny_steps(warm: int, count: int, lr: float = 1e-5) -> Iterator[Pair]:
    """Consecutive served views of real policy-gradient steps: tiny base model, addition, 16 x 16 samples, AdamW.

    `warm` steps come first: Adam's first step moves every weight by lr, which is no typical version.
    """
    from sprawl.policy.checkpoint import load_auxiliary, load_weights, read_architecture
    from sprawl.policy.decoder import Decoder
    from sprawl.problems import load_problem_set

    files = load_auxiliary(TINY)
    decoder = Decoder(read_architecture(files))
    decoder.load_state_dict({name: tensor.float() for name, tensor in load_weights(TINY).items()})
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=lr, weight_decay=0.0)
    problems = load_problem_set("addition", 0, {})
    vocabulary = json.loads(files["tokenizer.json"])["model"]["vocab"]
    letters = {index: token for token, index in vocabulary.items()}
    generator = torch.Generator().manual_seed(0)
    old: State | None = None
    for step in range(warm + count):
        batch = [problems.train(16 * step + k) for k in range(16) for _ in range(16)]
        ids = torch.tensor([[vocabulary[letter] for letter in problem.prompt] for problem in batch])
        start = ids.shape[1]
        with torch.no_grad():
            for _ in batch[0].answer:
                chances = decoder(ids)[:, -1].softmax(-1)
                ids = torch.cat((ids, torch.multinomial(chances, 1, generator=generator)), 1)
        answers = ["".join(letters[int(i)] for i in row[start:]) for row in ids]
        rewards = torch.tensor([float(a == p.answer) for a, p in zip(answers, batch, strict=True)]).reshape(16, 16)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1)
        losses = F.cross_entropy(decoder(ids)[:, start - 1 : -1].transpose(1, 2), ids[:, start:], reduction="none")
        optimizer.zero_grad(set_to_none=True)
        (losses.mean(1) * advantages).mean().backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        new = served_view({name: p.detach() for name, p in decoder.named_parameters()}, "bfloat16")
        if old is not None and step >= warm:
            yield old, new
        old = new


def _masters(elements: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One decoder layer's worth of fp32 weights: matrices of several scales, a bias, norms around 1."""
    side = 1 << (int(math.log2(elements / 8)) // 2)
    masters = {"norm.weight": 1 + 0.1 * torch.randn(side, generator=generator)}
    masters["q_proj.bias"] = 0.3 * torch.randn(side, generator=generator)
    rows = elements // side
    for name, share, scale in (
        ("q_proj", 1, 0.04),
        ("o_proj", 1, 0.02),
        ("up_proj", 3, 0.025),
        ("down_proj", 3, 0.015),
    ):
        masters[f"{name}.weight"] = scale * torch.randn(rows * share // 8, side, generator=generator)
    return masters


def _adam_step(masters: dict[str, torch.Tensor], lr: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One AdamW step (0.9, 0.999) from moments as they are after many steps of noisy gradients."""
    moved = {}
    for name, weight in masters.items():
        noise = 10 ** torch.randn(weight.shape[0], generator=generator).reshape(-1, *[1] * (weight.dim() - 1))
        gradient = noise * torch.randn(weight.shape, generator=generator)
        mean = noise * math.sqrt((1 - 0.9) / (1 + 0.9)) * torch.randn(weight.shape, generator=generator)
        mean.mul_(0.9).add_(gradient, alpha=0.1)
        square = gradient.square_().mul_(0.001).add_(noise**2, alpha=0.999)
        moved[name] = weight.addcdiv(mean, square.sqrt_().add_(1e-8), value=-lr)
    return moved


def learning_rate(share: float) -> float:
    """The rate at which an Adam step changes `share` of the bf16 weights of a synthetic layer."""
    low, high = 1e-9, 1e-3
    masters = _masters(1 << 20, torch.Generator().manual_seed(1))
    old = served_view(masters, "bfloat16")
    for _ in range(20):
        middle = math.sqrt(low * high)
        new = served_view(_adam_step(masters, middle, torch.Generator().manual_seed(2)), "bfloat16")
        changed = sum(int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in old)
        low, high = (low, middle) if changed > share * (1 << 20) else (middle, high)
    return math.sqrt(low * high)


def adam_steps(share: float, elements: int, group: int, view: str) -> Iterator[Pair]:
    """`elements` synthetic weights before and after an Adam step, `group` elements at a time.

    `share` is the part that changes in bf16; `view` is what is served: bf16, fp8 or nvfp4.
    """
    lr = learning_rate(share)
    for index in range(elements // group):
        generator = torch.Generator().manual_seed(index)
        masters = _masters(group, generator)
        old = _serve(masters, view, index)
        moved = _adam_step(masters, lr, generator)
        del masters
        yield old, _serve(moved, view, index)


def adam_state(share: float, elements: int, group: int, view: str) -> Pair:
    """The same as one state; `group` bounds only what making it takes."""
    old: State = {}
    new: State = {}
    for before, after in adam_steps(share, elements, group, view):
        old |= before
        new |= after
    return old, new


def _serve(masters: dict[str, torch.Tensor], view: str, index: int) -> State:
    state: State = {}
    for name, weight in masters.items():
        key = f"layers.{index}.{name}"
        if view == "bf16" or weight.dim() < 2:
            state[key] = weight.bfloat16()
        elif view == "fp8":
            state |= _fp8(key, weight)
        else:
            state |= _nvfp4(key, weight)
    return state


def _fp8(key: str, weight: torch.Tensor) -> State:
    """e4m3 with an fp32 scale a tensor: the largest weight is 448."""
    scale = weight.abs().max() / 448
    return {key: (weight / scale).to(torch.float8_e4m3fn), f"{key}_scale": scale}


def _nvfp4(key: str, weight: torch.Tensor) -> State:
    """e2m1 codes two to a byte (the first in the low half), e4m3 scales for 16 weights, one fp32 scale a tensor."""
    whole = weight.abs().max() / (6 * 448)
    blocks = weight.reshape(weight.shape[0], -1, 16)
    scales = (blocks.abs().amax(-1) / (6 * whole)).to(torch.float8_e4m3fn)
    scaled = blocks / (scales.float() * whole).clamp(min=1e-30)[..., None]
    codes = torch.bucketize(scaled.abs(), (FP4[1:] + FP4[:-1]) / 2).to(torch.uint8)
    codes = (codes | (scaled < 0).to(torch.uint8) << 3).reshape(weight.shape[0], -1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {f"{key}_packed": packed, f"{key}_scale": scales, f"{key}_global_scale": whole}
