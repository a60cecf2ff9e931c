"""AdamW against Muon: which share of the served bf16 weights changes in a step?

    python -m benchmarks.optimizers               three runs of configs/tiny.yaml, 40 dense steps each
    python -m benchmarks.optimizers --quick       8 small steps each: does everything still work?

Sparse versions rest on small pushes (the update against half the spacing of bf16). The evidence for them is on Adam;
Muon, which post-training moves to, gives every direction of a matrix the same length instead. Three arms, one seed:

- `adamw`: the config as it is.
- `muon`: hidden matrices by Muon at the same learning rate (match_rms_adamw: a step of full rank has a root mean square
  of 0.2 x lr; the gradients of a small batch are not of full rank, so it is less).
- `muon-rms`: the learning rate raised by the ratio of the two root mean squares that the first arms were measured to
  have, so that Muon moves the hidden matrices as far as AdamW does.

Shares come from the runs' ledgers and, for the hidden matrices alone, from the fp32 masters before and after the last
step, whose updates also predict the share. The same two masters as fp8, fp4 and int4 views show what lower precision
does to it. Rewards say that the arms train, not which one trains better.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from benchmarks.command import run, stream
from sprawl.board.ledger import Ledger
from sprawl.board.store import Store, open_store
from sprawl.config import RunConfig, load_config
from sprawl.delta.state import State
from sprawl.delta.stats import delta_stats
from sprawl.delta.views import make_view
from sprawl.errors import SprawlError
from sprawl.report.data import RunData, load_run
from sprawl.train.checkpoint import read_blob
from sprawl.train.optimizer import is_hidden_matrix

_DENSE = ("boundary.codec=dense", "anchor.enabled=false", "checkpoint.every=1")
_QUICK = ("rollout.islands=1", "rollout.prompts=4", "rollout.samples=8", "evaluate.problems=20", "probe.every=8")

_VIEWS = ("bfloat16", "float8_e4m3", "float8_e4m3_block", "mxfp4", "nvfp4", "int4_g128")


@dataclass(frozen=True)
class Row:
    """One arm. Shares are of served bf16 weights. `hidden_*`: the matrices that Muon steps, at the last step.

    `hidden_views`: by served format, the share of changed codes (scales left out) and the delta's bytes over the whole.
    """

    arm: str
    lr: float
    steps: int
    reward_first: float
    reward_last: float
    changed_mean: float
    changed_min: float
    changed_max: float
    delta_bytes_share: float
    hidden_changed: float
    hidden_predicted: float | None
    hidden_push_median: float | None
    hidden_push_rms: float
    hidden_views: dict[str, tuple[float, float]]


def hidden_masters(store: Store, run_id: str, step: int) -> State:
    """The fp32 masters of a checkpoint that Muon would step."""
    masters = read_blob(store, Ledger(store, run_id), step, "masters")
    return {name: tensor for name, tensor in masters.items() if is_hidden_matrix(name, tensor)}


def push_rms(old: State, new: State) -> float:
    """Root mean square of all updates."""
    squares = sum(float((new[name] - old[name]).double().square().sum()) for name in old)
    return math.sqrt(squares / sum(tensor.numel() for tensor in old.values()))


def view_shares(old: State, new: State) -> dict[str, tuple[float, float]]:
    """Served format -> (share of changed codes, bytes of the delta over those of the view)."""
    shares = {}
    for form in _VIEWS:
        stats = delta_stats(make_view(old, form), make_view(new, form))
        codes = [group for group in stats.groups if group.group != "scale"]
        changed = sum(group.changed for group in codes) / sum(group.elements for group in codes)
        shares[form] = changed, stats.total.delta_bytes / stats.total.whole_bytes
    return shares


def make_row(arm: str, data: RunData, old: State, new: State) -> Row:
    """What one run says. `old`, `new`: its hidden masters before and after the last step."""
    hidden = delta_stats(old, new, serve=torch.bfloat16)
    records = data.steps
    third = max(1, len(records) // 3)
    shares = [record.changed_share for record in records]
    deltas = [record.delta for record in records if record.kind == "delta"]
    return Row(
        arm=arm,
        lr=float(data.setting("optimizer.lr")),
        steps=len(records),
        reward_first=sum(record.reward for record in records[:third]) / third,
        reward_last=sum(record.reward for record in records[-third:]) / third,
        changed_mean=sum(shares) / len(shares),
        changed_min=min(shares),
        changed_max=max(shares),
        delta_bytes_share=sum(wire.sent for wire in deltas) / max(1, sum(wire.dense for wire in deltas)),
        hidden_changed=hidden.total.changed / hidden.total.elements,
        hidden_predicted=hidden.total.predicted,
        hidden_push_median=hidden.push,
        hidden_push_rms=push_rms(old, new),
        hidden_views=view_shares(old, new),
    )


def run_arm(arm: str, config: Path, board: str, overrides: Sequence[str]) -> Row:
    """Train one arm and measure it. Raises SprawlError when the run does not finish."""
    settings = load_config(config, list(overrides))  # every config error before the first second of training
    run_id = f"optimizers-{arm}"
    command = [sys.executable, "-m", "sprawl.cli", "run", str(config), "--runner", "plain", "--board", board]
    command += ["--run-id", run_id, *(part for item in overrides for part in ("--set", item))]
    code = stream(command, arm)
    if code not in (0, 1):  # 1: finished, with violations that its report names
        raise SprawlError(f"arm {arm} ended with code {code} before it finished", "see its output above")
    return measure(arm, open_store(board), run_id, settings)


def measure(arm: str, store: Store, run_id: str, settings: RunConfig) -> Row:
    """The row of a finished run, from its ledger and its last two checkpoints."""
    before, after = (hidden_masters(store, run_id, step) for step in (settings.steps - 1, settings.steps))
    return make_row(arm, load_run(store, run_id), before, after)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    head = (
        "| arm | lr | reward, first -> last third | changed a step, mean (min-max) | delta / whole | "
        "hidden: changed | predicted | push median / rms |"
    )
    lines = [head, "|---" * 8 + "|"]
    for row in rows:
        predicted = "-" if row.hidden_predicted is None else f"{row.hidden_predicted:.2%}"
        median = "-" if row.hidden_push_median is None else f"{row.hidden_push_median:.1e}"
        lines.append(
            f"| {row.arm} | {row.lr:.1e} | {row.reward_first:.3f} -> {row.reward_last:.3f} | "
            f"{row.changed_mean:.2%} ({row.changed_min:.2%}-{row.changed_max:.2%}) | {row.delta_bytes_share:.2%} | "
            f"{row.hidden_changed:.2%} | {predicted} | {median} / {row.hidden_push_rms:.1e} |"
        )
    lines += [
        "",
        f"| hidden matrices served as | {' | '.join(row.arm for row in rows)} |",
        "|---" * (len(rows) + 1) + "|",
    ]
    for form in _VIEWS:
        cells = [f"{share:.3%}, delta / whole {size:.3%}" for share, size in (row.hidden_views[form] for row in rows)]
        lines.append(f"| {form} | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(path_type=Path), default=Path("configs/tiny.yaml"), show_default=True)
@click.option("--steps", type=click.IntRange(min=2), help="Steps of each arm.  [default: 40, 8 with --quick]")
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), help="Learning rate.  [default: the config's]")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as one JSON list and nothing else on stdout.")
@click.option("--quick", is_flag=True, help="Few small steps: a check, not a measurement.")
def optimizers(config: Path, steps: int | None, lr: float | None, as_json: bool, quick: bool) -> None:
    """Train the three arms and compare the shares of weights that change. Progress goes to stderr."""
    steps = steps or (8 if quick else 40)
    base = [f"steps={steps}", f"evaluate.every={steps}", *_DENSE, *(_QUICK if quick else ())]
    base += [] if lr is None else [f"optimizer.lr={lr}"]
    with tempfile.TemporaryDirectory(prefix="sprawl-optimizers-") as board:
        rows = [run_arm("adamw", config, board, base)]
        muon = [*base, "optimizer.kind=muon"]
        rows.append(run_arm("muon", config, board, muon))
        matched = rows[1].lr * rows[0].hidden_push_rms / rows[1].hidden_push_rms
        rows.append(run_arm("muon-rms", config, board, [*muon, f"optimizer.lr={matched:.3e}"]))
    click.echo(json.dumps([asdict(row) for row in rows], allow_nan=False) if as_json else table(rows))


if __name__ == "__main__":
    run(optimizers)
