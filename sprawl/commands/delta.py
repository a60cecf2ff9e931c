"""`sprawl delta`: compare, encode and apply lossless weight deltas between two checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sprawl.commands.options import FiniteRange, json_option

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
@click.option("--push", type=FiniteRange(min=0, min_open=True), help="Size of an update, about lr x steps.")
@click.option("--serve", type=click.Choice(["bfloat16", "float16"]), help="OLD and NEW are fp32 masters, served so.")
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE.png", help="Draw push against floor.")
@json_option
def stats(old: str, new: str, push: float | None, serve: str | None, plot: str | None, as_json: bool) -> None:
    """What changed between two checkpoints, by tensor group and by weight magnitude, predicted and measured.

    OLD and NEW may be fsspec URLs (s3://bucket/step-99) and of any size: they are read piece by piece.

    A served weight changes only when the optimizer's push carries it over the floor: half the spacing of its dtype
    at that magnitude, theta/256 for bfloat16. So the share that changed falls with magnitude, which is what makes
    deltas small. A push p is expected to change a share of p / spacing of the weights; without --push, p is the
    number that explains the total, and the rows show whether it explains them.

    \b
    Examples:
      sprawl delta stats step-99 step-100
      sprawl delta stats step-99/model.safetensors step-100/model.safetensors --json
      sprawl delta stats s3://runs/a/step-99 s3://runs/a/step-100 --push 1e-6 --plot update.png
    """
    import torch

    from sprawl.commands.delta_stats import print_stats
    from sprawl.delta.checkpoints import Checkpoint
    from sprawl.delta.stats import delta_stats

    dtype = getattr(torch, serve) if serve else None
    result = delta_stats(Checkpoint(old), Checkpoint(new), push=push, serve=dtype)
    if plot:
        from sprawl.delta.files import write_atomically
        from sprawl.report.push_floor import push_floor_png

        write_atomically(Path(plot), push_floor_png(result))
    if as_json:
        click.echo(json.dumps(result.as_dict()))
        return
    print_stats(result)
    if plot:
        click.echo(plot)


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
