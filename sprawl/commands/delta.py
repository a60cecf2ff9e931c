"""`sprawl delta`: compare, encode and apply lossless weight deltas between two checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from sprawl.delta.stats import DeltaStats

_MODEL = "A safetensors file or a Hugging Face model directory."


@click.group()
def delta() -> None:
    """Compare two checkpoints of a model and turn one into the other, bit for bit.

    OLD and NEW are Hugging Face safetensors directories or files of the served weights (bf16, fp16, fp8 ...).

    \b
    Examples:
      sprawl delta stats step-99 step-100             what changed, and what a delta costs
      sprawl delta encode step-99 step-100 -o 100.delta
      sprawl delta apply step-99 100.delta -o rebuilt    refuses a base it was not made for
    """


@delta.command()
@click.argument("old")
@click.argument("new")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def stats(old: str, new: str, as_json: bool) -> None:
    """What changed between two checkpoints, by tensor group and by weight magnitude.

    A served weight changes only when the optimizer's push is larger than the floor: half the spacing of its dtype
    at that magnitude. So the share that changed falls with magnitude, which is what makes deltas small.

    \b
    Examples:
      sprawl delta stats step-99 step-100
      sprawl delta stats step-99/model.safetensors step-100/model.safetensors --json
    """
    from sprawl.delta.files import load_state
    from sprawl.delta.stats import delta_stats

    result = delta_stats(load_state(old), load_state(new))
    if as_json:
        click.echo(json.dumps(result.as_dict()))
    else:
        _print_stats(result)


def _print_stats(result: DeltaStats) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    groups = Table("group", box=None, pad_edge=False)
    for heading in ("tensors", "weights", "changed", "delta bytes", "whole bytes", "delta/whole"):
        groups.add_column(heading, justify="right")
    for row in [*result.groups, result.total]:
        groups.add_row(
            row.group,
            f"{row.tensors:,}",
            f"{row.elements:,}",
            f"{row.changed / max(1, row.elements):.3%}",
            f"{row.delta_bytes:,}",
            f"{row.whole_bytes:,}",
            f"{row.delta_bytes / max(1, row.whole_bytes):.3%}",
        )
    console.print(groups)
    decades = Table("old magnitude", box=None, pad_edge=False)
    for heading in ("weights", "changed", "floor (half ulp)", "step where changed"):
        decades.add_column(heading, justify="right")
    for decade in result.decades:
        decades.add_row(
            "0" if decade.exponent is None else f"1e{decade.exponent:+03d} to 1e{decade.exponent + 1:+03d}",
            f"{decade.elements:,}",
            f"{decade.changed / max(1, decade.elements):.3%}",
            f"{decade.floor:.1e}",
            "" if decade.step is None else f"{decade.step:.1e}",
        )
    if result.decades:
        console.print()
        console.print(decades)


@delta.command()
@click.argument("old")
@click.argument("new")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="File to write.")
def encode(old: str, new: str, output: str) -> None:
    """Write the lossless delta that turns OLD into NEW.

    The file names the states it belongs to by root digest, so that it cannot be applied to the wrong one.

    \b
    Example:
      sprawl delta encode step-99 step-100 -o 100.delta
    """
    from sprawl.delta.codec import encode as encode_delta
    from sprawl.delta.files import load_state, write_atomically
    from sprawl.delta.state import root_digest, state_bytes, tensor_digests

    base, target = load_state(old), load_state(new)
    roots = [root_digest(tensor_digests(state)) for state in (base, target)]
    encoded = encode_delta(base, target, base_root=roots[0], new_root=roots[1])
    write_atomically(Path(output), encoded.blob)
    full = state_bytes(target)
    click.echo(
        f"{output}: {len(encoded.blob):,} bytes, {len(encoded.blob) / max(1, full):.3%} of {full:,}; "
        f"{encoded.changed / max(1, encoded.elements):.3%} of {encoded.elements:,} weights changed"
    )


@delta.command()
@click.argument("old")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False), help="Model directory to write.")
def apply(old: str, file: str, output: str) -> None:
    """Rebuild NEW from OLD and a delta FILE; OLD is not modified.

    Configuration files beside OLD are copied along. The result is checked against the digest in the delta before
    anything is written.

    \b
    Example:
      sprawl delta apply step-99 100.delta -o rebuilt
    """
    from sprawl.delta.codec import apply as apply_delta
    from sprawl.delta.codec import decode
    from sprawl.delta.files import load_state, read_file, save_state
    from sprawl.delta.state import root_digest, tensor_digests
    from sprawl.errors import IntegrityError

    blob = read_file(Path(file))
    state = load_state(old)
    overwrites = decode(state, blob, name=file)
    root = root_digest(tensor_digests(state))
    if overwrites.base_root not in (None, root):
        raise IntegrityError(f"{file} was made for another state than {old}", f"its base is {overwrites.base_root}")
    apply_delta(state, overwrites)
    root = root_digest(tensor_digests(state))
    if overwrites.new_root not in (None, root):
        raise IntegrityError(f"{file} applied to {old} gives {root}, it promised {overwrites.new_root}")
    target = save_state(state, output, like=old)
    click.echo(f"{target}: {len(overwrites.changed)} tensors changed, root digest {root}")
