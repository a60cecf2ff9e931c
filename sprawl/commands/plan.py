"""`sprawl plan`: what a run will need, before it is started."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sprawl.commands.options import json_option

if TYPE_CHECKING:
    from pydantic import BaseModel

    from sprawl.plan.estimate import Plan

    M = TypeVar("M", bound=BaseModel)


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Override a config field (repeatable).")
@click.option(
    "--model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="config.json of the model, where policy.base is not here.",
)
@click.option("--islands", type=click.IntRange(min=1), help="Islands.  [default: rollout.islands]")
@click.option(
    "--assume",
    multiple=True,
    metavar="NAME=VALUE",
    help="changed_share, prompt_tokens, response_tokens, step_seconds, remote_share (repeatable).",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="NAME=DOLLARS",
    help="trainer (a node an hour), nodes, island, anchor, egress_gb (repeatable).",
)
@click.option("--sizing", is_flag=True, help="Print the sizing table of public model shapes instead; needs no CONFIG.")
@click.option("--served", default=None, help="Served format of the sizing table.  [default: bfloat16]")
@json_option
def plan(
    config: Path | None,
    overrides: tuple[str, ...],
    model: Path | None,
    islands: int | None,
    assume: tuple[str, ...],
    prices: tuple[str, ...],
    sizing: bool,
    served: str | None,
    as_json: bool,
) -> None:
    """Bytes a step, seconds to sync over each link, memory of each stage, and dollars an hour of CONFIG.

    Parameters and boundary bytes are counted; the size of a delta, activations and times are estimates, and only what
    is given has a price.

    \b
    Examples:
      sprawl plan configs/tiny.yaml
      sprawl plan configs/tiny.yaml --model ~/Qwen2.5-7B/config.json --islands 16 --assume changed_share=0.02 \\
        --price trainer=55 --price nodes=2 --price island=1.1 --price egress_gb=0.09
      sprawl plan --sizing --served float8_e4m3
    """  # fmt: skip
    from sprawl.plan.size import BITS

    if sizing:
        from sprawl.plan.sizing import sizing as table

        if served is not None and served not in BITS:
            raise click.UsageError(f"--served {served!r} is not known: {', '.join(BITS)}")
        rows = table(served or "bfloat16")
        click.echo(json.dumps([asdict(row) for row in rows]) if as_json else sizing_table(rows))
        return
    if config is None:
        raise click.UsageError("give a CONFIG, or --sizing")
    if served is not None:
        raise click.UsageError("--served is for --sizing; of a CONFIG it is --set publish.dtype=FORMAT")
    from sprawl.config import load_config
    from sprawl.plan.estimate import Assumptions, Prices, plan_run
    from sprawl.plan.size import size_of
    from sprawl.policy.checkpoint import read_architecture

    loaded = load_config(config, list(overrides))
    arch = read_architecture({"config.json": (model or _model_config(loaded.policy.base)).read_bytes()})
    size = size_of(arch, loaded.policy.stages, loaded.policy.split)
    assumed = _given(Assumptions, assume, "--assume")
    found = plan_run(loaded, size, assumed, _given(Prices, prices, "--price"), islands)
    if as_json:
        click.echo(json.dumps({**asdict(found), "hourly": found.hourly, "assumed": assumed.model_dump()}))
        return
    click.echo(describe(found))


def _model_config(base: str) -> Path:
    """config.json of a base model that is on this machine. Raises ConfigError."""
    from sprawl.errors import ConfigError

    for directory in (Path(base).expanduser(), Path("models") / base):
        if (directory / "config.json").is_file():
            return directory / "config.json"
    raise ConfigError(f"policy.base {base!r} is not on this machine", "say with --model where its config.json is")


def _given(kind: type[M], given: tuple[str, ...], option: str) -> M:
    """Values of `NAME=VALUE` options. Raises ConfigError."""
    from pydantic import ValidationError

    from sprawl.config import apply_overrides, describe_validation_error
    from sprawl.errors import ConfigError

    try:
        return kind.model_validate(apply_overrides({}, list(given), option))
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error, kind, option)) from None


def describe(plan: Plan) -> str:
    """The plan as text."""
    lines = [
        f"model      {plan.parameters:,} parameters, {_bytes(plan.served_bytes)} as served",
        f"a step     {plan.tokens:,} tokens",
        f"  version    {_bytes(plan.delta_bytes)} delta; {_bytes(plan.board_bytes)} to the board, keyframes included",
        f"  boundaries {_boundaries(plan)}",
        f"  rollouts   {_bytes(plan.rollout_bytes)}",
        f"  checkpoint {_bytes(plan.checkpoint_bytes)} when one is due; sign map {_bytes(plan.sign_bytes)} a fire",
        "to sync    " + "  ".join(f"{name:>11}" for name in plan.links),
        "  delta      " + "  ".join(f"{_seconds(link.delta_s):>11}" for link in plan.links.values()),
        "  keyframe   " + "  ".join(f"{_seconds(link.keyframe_s):>11}" for link in plan.links.values()),
        "memory     weights, gradients, optimizer + activations (estimate)",
    ]
    lines += [
        f"  stage {number:<4} {_bytes(stage.state)} + {_bytes(stage.activations)}"
        for number, stage in enumerate(plan.stages)
    ]
    lines.append(f"  island     {_bytes(plan.island_weights)} weights + {_bytes(plan.island_cache)} cache")
    parts = ", ".join(f"{name} {value:.2f}" for name, value in plan.dollars.items() if value)
    lines.append(f"an hour    ${plan.hourly:.2f}" + (f" ({parts})" if parts else " (no --price given)"))
    return "\n".join(lines)


def _boundaries(plan: Plan) -> str:
    """Bytes that cross the stage boundaries, and how they compare."""
    if not plan.boundary_bytes:
        return "none: one stage"
    if plan.boundary_bytes == plan.dense_boundary_bytes:
        return f"{_bytes(plan.boundary_bytes)} (dense)"
    saved = plan.dense_boundary_bytes / plan.boundary_bytes
    return f"{_bytes(plan.boundary_bytes)} ({saved:.1f} times less than dense)"


def sizing_table(rows: list[Any]) -> str:
    """Markdown."""
    lines = [
        "| model | served | delta | islands | board | version latency | with a mirror | whole version |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.model} | {_bytes(row.served_bytes)} | {_bytes(row.delta_bytes)} | {row.islands} | "
        f"{row.board_gbit:g} Gbit/s | {_seconds(row.latency_s)} | {_seconds(row.mirrored_s)} | "
        f"{_seconds(row.keyframe_s)} |"
        for row in rows
    ]
    return "\n".join(lines)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    raise AssertionError


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"
