"""Bytes, seconds, memory and dollars of a run, from its config, the size of its model, and what is assumed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from sprawl.config import RunConfig
from sprawl.config_training import Section
from sprawl.plan.size import BITS, Size

LINKS = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}  # bytes a second
STEP_BITS = 1.0  # a changed weight's new value, on the average: most move by one step of their format


class Assumptions(Section):
    """What a config does not say."""

    changed_share: float = Field(0.01, gt=0, le=1, description="Of the served weights, a step.")
    prompt_tokens: int = Field(64, gt=0, description="Of a prompt.")
    response_tokens: int | None = Field(None, gt=0, description="Of a response; default: rollout.max_new_tokens.")
    step_seconds: float = Field(60.0, gt=0, description="Of an optimizer step.")
    remote_share: float = Field(1.0, ge=0, le=1, description="Of the islands, for which reading the board is egress.")


class Prices(Section):
    """Dollars. Nothing is assumed: what is not given costs nothing here."""

    trainer: float = Field(0.0, ge=0, description="A trainer node an hour.")
    nodes: int = Field(1, ge=1, description="Trainer nodes.")
    island: float = Field(0.0, ge=0, description="An island an hour.")
    anchor: float = Field(0.0, ge=0, description="The anchor's machine an hour.")
    egress_gb: float = Field(0.0, ge=0, description="A gigabyte (1e9) from the board to an island.")


@dataclass(frozen=True)
class StageMemory:
    """Bytes. `state`: fp32 masters, gradients and the optimizer's two moments. `activations`: an estimate."""

    parameters: int
    state: int
    activations: int


@dataclass(frozen=True)
class Link:
    """Seconds to bring a version over one link, transfer alone."""

    delta_s: float
    keyframe_s: float


@dataclass(frozen=True)
class Plan:
    """`boundary_bytes` and `dense_boundary_bytes`: over all boundaries, both directions, a step. `rollout_bytes`: a
    step's batch on the board. Dollars an hour by what they are for."""

    parameters: int
    tokens: int
    served_bytes: int
    delta_bytes: int
    board_bytes: int
    boundary_bytes: int
    dense_boundary_bytes: int
    rollout_bytes: int
    sign_bytes: int
    checkpoint_bytes: int
    stages: tuple[StageMemory, ...]
    island_weights: int
    island_cache: int
    links: Mapping[str, Link]
    dollars: Mapping[str, float]

    @property
    def hourly(self) -> float:
        return sum(self.dollars.values())


def plan_run(config: RunConfig, size: Size, assumed: Assumptions, prices: Prices, islands: int | None = None) -> Plan:
    """Everything above. Bytes and parameters are counted; activations, the delta and times are estimates."""
    rollout, islands = config.rollout, islands if islands is not None else config.rollout.islands
    samples = rollout.prompts * rollout.samples
    length = assumed.prompt_tokens + (assumed.response_tokens or rollout.max_new_tokens)
    tokens = samples * length
    served = size.served_bytes(config.publish.dtype)
    delta = delta_bytes(size, config.publish.dtype, assumed.changed_share)
    # Keyframes go out beside their delta, so that the chain can be checked; islands in step read the delta only.
    board = delta + served / config.publish.keyframe_every
    number = 4 if config.policy.compute_dtype == "float32" else 2
    crossings = (config.policy.stages - 1) * tokens * _passes(config) * number
    width = size.hidden if config.boundary.codec == "dense" else max(1, round(config.boundary.ratio * size.hidden))
    steps_per_hour = 3600 / assumed.step_seconds
    egress = delta * islands * assumed.remote_share * steps_per_hour / 1e9 * prices.egress_gb
    return Plan(
        parameters=size.parameters,
        tokens=tokens,
        served_bytes=served,
        delta_bytes=delta,
        board_bytes=round(board),
        boundary_bytes=crossings * width,
        dense_boundary_bytes=crossings * size.hidden,
        rollout_bytes=tokens * 8 + samples * 64,
        sign_bytes=math.ceil(size.parameters / 8) if config.anchor.enabled else 0,
        checkpoint_bytes=12 * size.parameters,
        stages=tuple(
            StageMemory(count, 16 * count, _activations(config, size, stage, number))
            for stage, count in enumerate(size.stages)
        ),
        island_weights=served,
        island_cache=size.kv_bytes * math.ceil(samples / islands) * length if islands else 0,
        links={name: Link(delta / rate, served / rate) for name, rate in LINKS.items()},
        dollars={
            "trainer": prices.trainer * prices.nodes,
            "islands": prices.island * islands,
            "anchor": prices.anchor if config.anchor.enabled else 0.0,
            "egress": egress,
        },
    )


def delta_bytes(size: Size, served: str, changed: float) -> int:
    """An estimate from above: the entropy of which weights changed, without the knowledge of the old values that the
    codec makes use of, and a number for each; never more than the view itself."""
    share = -changed * math.log2(changed) - (1 - changed) * math.log2(1 - changed) if changed < 1 else 0.0
    bits = share + changed * STEP_BITS
    return min(round(size.parameters * bits / 8), round(size.parameters * BITS[served] / 8))


def _passes(config: RunConfig) -> int:
    """Times that a token's payload crosses a boundary in a step: forward and backward of every epoch, the old
    log-probs where a batch is trained on more than once, the reference where the loss needs it."""
    grpo = config.grpo
    several = grpo.epochs * grpo.minibatches > 1
    return 2 * grpo.epochs + (1 if several else 0) + (1 if grpo.kl_coef > 0 else 0)


def _activations(config: RunConfig, size: Size, stage: int, number: int) -> int:
    """Of the microbatches that 1F1B holds at once on this stage; logits on the last."""
    grpo, policy = config.grpo, config.policy
    length = config.rollout.max_new_tokens + 64
    rows = min(grpo.microbatch_rows, config.rollout.prompts * config.rollout.samples)
    tokens = grpo.microbatch_tokens or rows * length
    held = min(policy.stages - stage, policy.stages) if policy.runtime == "multi" else 1
    layers = size.stage_layers[stage]
    if policy.gradient_checkpointing:
        per_token = layers * size.hidden + 8 * size.hidden + 3 * size.intermediate
    else:
        per_token = layers * (8 * size.hidden + 3 * size.intermediate)
    logits = 2 * size.vocab * 4 if stage == policy.stages - 1 else 0
    return held * tokens * per_token * number + tokens * logits
