"""What the boundary codecs cost and what they keep.

    python -m benchmarks.boundary           a few minutes
    python -m benchmarks.boundary --quick   under a minute: fewer repetitions, a shorter wide step

Three tables. The mask: microseconds a token of each implementation. The share of a training step that goes into masks,
for the tiny run (the real Trainer.step) and at H = 1536 (stages of one layer of Qwen2.5-1.5B, forward and backward
only: a boundary a layer is four times as dense as in the report's run, and no optimizer runs, so the share is an upper
bound). The codecs at equal bytes, on the tiny run's base model and real samples of it: how well the compressed
gradient points along the dense one. Targets: masks under 10 % of the tiny step, under 5 % at H = 1536.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.command import run
from benchmarks.tiny import sample_batch, tiny_model
from sprawl.config import BoundaryConfig, RunConfig, load_config
from sprawl.policy import Architecture, Decoder
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.train import prf
from sprawl.train.codecs import BasisObserver, BoundaryCodec, PrfCodec, SubspaceCodec, TokenIds, WireCounter, make_codec
from sprawl.train.losses.objective import make_targets, microbatch_loss
from sprawl.train.pipeline import Packed, StagedPolicy, pack
from sprawl.train.probe import compare_gradients, take_gradients
from sprawl.train.trainer import Trainer

RATIO = 0.05
TARGETS = {"tiny": 0.10, "wide": 0.05}
# One layer of Qwen2.5-Math-1.5B; the vocabulary is short, because the head is not what is measured.
WIDE = {
    "model_type": "qwen2",
    "vocab_size": 1024,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class MaskCost:
    where: str
    hidden: int
    keep: int
    us_a_token: float


@dataclass(frozen=True)
class StepShare:
    """Seconds of a whole step and of deriving all its masks once (every pass of a step shares them)."""

    name: str
    hidden: int
    boundaries: int
    tokens: int
    step_s: float
    masks_s: float
    share: float
    target: float


@dataclass(frozen=True)
class CodecQuality:
    """Against the dense gradient of the same samples; means over steps, each with its own masks."""

    codec: str
    bytes_share: float
    cosine: float
    cosine_error: float
    norm_ratio: float
    step_over_dense: float


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """Median wall time, after one run to compile and warm up."""
    action()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def mask_costs(repeats: int, device: str = "cpu") -> list[MaskCost]:
    """Every implementation that runs on `device`."""
    rows = []
    for hidden, keep, count in ((128, 6, 8000), (1536, 77, 800)):
        sample, position = torch.arange(count, device=device) // 16, torch.arange(count, device=device) % 16
        makers = {"compiled loop" if device == "cpu" else "kernel": prf.channels, "torch": prf.reference_channels}
        for name, maker in makers.items():
            derive = partial(_settled, maker, 7, sample, position, hidden, keep)
            rows.append(MaskCost(f"{device}, {name}", hidden, keep, median_seconds(derive, repeats) / count * 1e6))
    return rows


def _settled(maker: Callable[..., Tensor], *arguments: object) -> None:
    """Until the result is there, also on a device that works on its own."""
    if maker(*arguments).is_cuda:
        torch.cuda.synchronize()


def derive_masks(codec: PrfCodec, packs: Sequence[Packed], hidden: int, boundaries: int, step: int) -> None:
    """All masks of a step, uncached."""
    for packed in packs:
        tokens = TokenIds(packed.tokens.sample, packed.tokens.position, packed.tokens.index)
        for layer in range(boundaries):
            codec.channels(hidden, layer, step, tokens)


def tiny_share(config: RunConfig, batch: RolloutBatch, repeats: int) -> StepShare:
    """The real step of the tiny run, without the probes that not every step has."""
    trainer = Trainer(tiny_model(config)[0], tiny_model(config)[0], config)
    codec, hidden = PrfCodec(config.seed, config.boundary.ratio), trainer.decoder.arch.hidden
    boundaries = config.policy.stages - 1
    packs = [micro.packed for update in trainer.plan(batch) for micro in update]
    masks, steps, number = [], [], 1
    for _ in range(repeats + 1):
        number += 1 + (number % config.probe.every == config.probe.every - 1)
        started = time.perf_counter()
        trainer.step(number, batch, None)
        between = time.perf_counter()
        derive_masks(codec, packs, hidden, boundaries, number)
        steps.append(between - started)
        masks.append(time.perf_counter() - between)
    return _share("tiny", hidden, boundaries, packs, steps[1:], masks[1:])


def wide_share(rows: int, length: int, stages: int, repeats: int) -> StepShare:
    """Forward and backward of `stages` stages of one layer at H = 1536, `rows` sequences of `length` tokens."""
    torch.manual_seed(0)
    decoder = Decoder(Architecture.from_hf({**WIDE, "num_hidden_layers": stages}))
    policy = StagedPolicy(decoder, decoder.arch.split(stages), torch.float32)
    tokens = torch.randint(1, 1024, (rows, length), dtype=torch.int32)
    half = torch.full((rows,), length // 2, dtype=torch.int32)
    packed = pack(tokens, half, half, torch.arange(rows))
    codec, masks, steps = PrfCodec(7, RATIO), [], []
    for number in range(repeats + 1):
        started = time.perf_counter()
        packed.tokens.cache.clear()
        policy.token_stats(packed, codec=codec, step=number).logprobs.sum().backward()
        decoder.zero_grad(set_to_none=True)
        between = time.perf_counter()
        derive_masks(codec, [packed], 1536, stages - 1, number)
        steps.append(between - started)
        masks.append(time.perf_counter() - between)
    return _share("wide", 1536, stages - 1, [packed], steps[1:], masks[1:])


def _share(
    name: str, hidden: int, boundaries: int, packs: Sequence[Packed], steps: Sequence[float], masks: Sequence[float]
) -> StepShare:
    step, mask = statistics.median(steps), statistics.median(masks)
    tokens = sum(packed.tokens.index.shape[0] for packed in packs)
    return StepShare(name, hidden, boundaries, tokens, step, mask, mask / step, TARGETS[name])


CODECS: dict[str, dict[str, object]] = {
    "prf": {"codec": "prf"},
    "quantized-prf, 8 bits": {"codec": "quantized-prf", "bits": 8},
    "quantized-prf, 4 bits": {"codec": "quantized-prf", "bits": 4},
    "quantized-prf, 3 bits": {"codec": "quantized-prf", "bits": 3},
    "subspace, 3 refreshes": {"codec": "subspace"},
}
RATIOS = (RATIO, 2 * RATIO)


def codec_qualities(config: RunConfig, batch: RolloutBatch, steps: int) -> list[CodecQuality]:
    """Each codec's gradient of one batch at the base model's weights, under the masks of `steps` steps."""
    decoder, _ = tiny_model(config)
    policy = StagedPolicy(decoder, decoder.arch.split(config.policy.stages), torch.float32)
    dense, wire, dense_s = gradient(policy, batch, config, None, 0)
    rows = []
    for ratio, name in itertools.product(RATIOS, CODECS):
        codec = make_codec(BoundaryConfig.model_validate({**CODECS[name], "ratio": ratio}), config.seed)
        if isinstance(codec, SubspaceCodec):
            for _ in range(3):
                observer = BasisObserver(codec)
                gradient(policy, batch, config, observer, 0)
                codec.use(observer.refreshed())
        cosines, ratios, seconds = [], [], []
        # The first step warms up: quantized-prf then knows the mean of a step before.
        for step in range(steps + 1):
            codec.begin(step)
            compressed, wire, spent = gradient(policy, batch, config, codec, step)
            probe = compare_gradients(compressed, dense)
            cosines.append(probe.cosine)
            ratios.append(probe.norm_ratio)
            seconds.append(spent)
        rows.append(
            CodecQuality(
                codec=name,
                bytes_share=wire.sent / wire.dense,
                cosine=statistics.fmean(cosines[1:]),
                cosine_error=statistics.stdev(cosines[1:]) / steps**0.5,
                norm_ratio=statistics.fmean(ratios[1:]),
                step_over_dense=statistics.median(seconds[1:]) / dense_s,
            )
        )
    return rows


def gradient(
    policy: StagedPolicy, batch: RolloutBatch, config: RunConfig, codec: BoundaryCodec | None, step: int
) -> tuple[dict[str, Tensor], WireCounter, float]:
    """The policy gradient of a batch, what crossed the boundaries, and the seconds it took."""
    targets, wire, started = make_targets(batch, config), WireCounter(), time.perf_counter()
    rows = torch.arange(batch.samples)
    packed = pack(batch.tokens, batch.prompt_lengths, batch.response_lengths, rows)
    logprobs = policy.token_stats(packed, codec=codec, step=step, wire=wire).logprobs
    weights = targets.weights(rows, config)
    microbatch_loss(
        logprobs, logprobs.detach(), None, None, targets.advantages, weights, targets.counts, config.grpo
    ).loss.backward()
    spent = time.perf_counter() - started
    return take_gradients(dict(policy.decoder.named_parameters())), wire, spent


def tables(masks: Sequence[MaskCost], shares: Sequence[StepShare], qualities: Sequence[CodecQuality]) -> str:
    """Markdown."""
    lines = ["| mask | H | k | us a token |", "|---" * 4 + "|"]
    lines += [f"| {row.where} | {row.hidden} | {row.keep} | {row.us_a_token:.2f} |" for row in masks]
    lines += ["", "| step | H | boundaries | tokens | masks / step | target |", "|---" * 6 + "|"]
    lines += [
        f"| {row.name} | {row.hidden} | {row.boundaries} | {row.tokens} | {row.share:.2%} | < {row.target:.0%} |"
        for row in shares
    ]
    lines += [
        "",
        "| codec at equal bytes | bytes / dense | cosine to the dense gradient | norm ratio | time / dense |",
        "|---" * 5 + "|",
    ]
    lines += [
        f"| {row.codec} | {row.bytes_share:.2%} | {row.cosine:.3f} +- {row.cosine_error:.3f} | {row.norm_ratio:.2f} | "
        f"{row.step_over_dense:.2f} |"
        for row in qualities
    ]
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(path_type=Path), default=Path("configs/tiny.yaml"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on stdout.")
@click.option("--quick", is_flag=True, help="Fewer repetitions, a shorter wide step.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads of torch.")
def boundary(config: Path, as_json: bool, quick: bool, threads: int) -> None:
    """Measure masks, their share of a step, and the codecs. Exit code 1 when a share is above its target."""
    torch.set_num_threads(threads)
    settings = load_config(config)
    base, tokenizer = tiny_model(settings)
    batch = sample_batch(settings, base, tokenizer, 1)
    masks = mask_costs(3 if quick else 10)
    if torch.cuda.is_available():
        masks += mask_costs(10, "cuda")
    else:
        click.echo("masks on a GPU: not run, there is none", err=True)
    shares = [
        tiny_share(settings, batch, 2 if quick else 10),
        wide_share(4, 64, 2, 1) if quick else wide_share(8, 128, 4, 2),
    ]
    qualities = codec_qualities(settings, batch, 2 if quick else 20)
    if as_json:
        found = {"masks": masks, "shares": shares, "codecs": qualities}
        click.echo(json.dumps({name: [asdict(row) for row in rows] for name, rows in found.items()}, allow_nan=False))
    else:
        click.echo(tables(masks, shares, qualities))
    if any(row.share >= row.target for row in shares):
        sys.exit(1)


if __name__ == "__main__":
    run(boundary)
