"""Tables of `sprawl delta stats`."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from sprawl.delta.encodings import NAMES
from sprawl.delta.stats import DeltaStats


def print_stats(result: DeltaStats) -> None:
    """By tensor group, by magnitude, and the size by encoding, to stdout."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_groups(result))
    if result.decades:
        console.print()
        console.print(_decades(result))
    if result.push is not None:
        how = {
            "given": "as given",
            "fitted": "the one update size that explains the total share; the rows test it",
            "measured": "median of all updates of the masters; the prediction uses every one of them",
        }[result.push_is]
        console.print(f"\npush {result.push:.2e} ({how})", highlight=False)
    console.print()
    console.print(_sizes(result))


def _table(first: str, *headings: str) -> Table:
    table = Table(first, box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3%}"


def _groups(result: DeltaStats) -> Table:
    table = _table("group", "tensors", "weights", "changed", "predicted", "delta bytes", "whole bytes", "delta/whole")
    for row in [*result.groups, result.total]:
        table.add_row(
            row.group,
            f"{row.tensors:,}",
            f"{row.elements:,}",
            _share(row.changed / max(1, row.elements)),
            _share(row.predicted),
            f"{row.delta_bytes:,}",
            f"{row.whole_bytes:,}",
            _share(row.delta_bytes / max(1, row.whole_bytes)),
        )
    return table


def _decades(result: DeltaStats) -> Table:
    table = _table("old magnitude", "weights", "changed", "predicted", "floor (half ulp)", "step where changed")
    for decade in result.decades:
        table.add_row(
            "0" if decade.exponent is None else f"1e{decade.exponent:+03d} to 1e{decade.exponent + 1:+03d}",
            f"{decade.elements:,}",
            _share(decade.changed / max(1, decade.elements)),
            _share(decade.predicted),
            f"{decade.floor:.1e}",
            "" if decade.step is None else f"{decade.step:.1e}",
        )
    return table


def _sizes(result: DeltaStats) -> Table:
    total = result.total
    table = _table("encoding", "bytes", "of whole", "of sprawl's")
    rows = {"sprawl": total.delta_bytes, **{NAMES[key]: size for key, size in total.sizes.items()}}
    for name, size in {**rows, "whole, uncompressed": total.whole_bytes}.items():
        table.add_row(
            name, f"{size:,}", _share(size / max(1, total.whole_bytes)), f"{size / max(1, total.delta_bytes):.2f} x"
        )
    return table
