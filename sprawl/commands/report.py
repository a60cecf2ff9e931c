"""`sprawl report`: what a run measured, as one HTML page."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sprawl.commands.options import json_option, run_on_board


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@run_on_board
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Where to write.  [default: reports/<run_id>]"
)
@json_option
@click.option(
    "--compare",
    "others",
    multiple=True,
    metavar="RUN_ID",
    help="Lay this run beside RUN_ID as well: comparison.png, .md and .json. Repeatable.",
)
def report(run_id: str, board: str, out: Path | None, as_json: bool, others: tuple[str, ...]) -> None:
    """Write the report of RUN_ID (default: latest, the newest run) from its ledger.

    The page opens in any browser and loads nothing from the network. It works while the run trains, and for a run
    that was stopped.

    \b
    Examples:
      sprawl report                                   the newest run under ./runs
      sprawl report latest --json | jq .violations    numbers for a script
      sprawl report RUN --board s3://bucket/prefix    a run on an object store
      sprawl report RUN --compare A --compare B       one figure and one table of three runs

    \b
    Writes under --out:
      index.html      the whole report, figures included
      *.png           each figure by itself
      summary.json    every number on the page (what --json prints)

    Exit code 0 also when the ledger shows violations: read them in the page, or in `violations` of the JSON.
    """
    from sprawl.board.ledger import resolve_run
    from sprawl.board.store import open_store
    from sprawl.report.compare import comparison_rows, write_comparison
    from sprawl.report.data import load_run
    from sprawl.report.page import write_report

    store = open_store(board)
    run_id = resolve_run(store, run_id)
    out = out or Path("reports") / run_id
    paths = write_report(store, run_id, out)
    summary = json.loads(paths.json.read_text(encoding="utf-8"))
    written = [paths.index]
    if others:
        runs = [load_run(store, resolve_run(store, name)) for name in (run_id, *others)]
        written.append(write_comparison(runs, out).png)
        summary["comparison"] = comparison_rows(runs)
    if as_json:
        click.echo(json.dumps(summary, allow_nan=False))
        return
    violations = summary["violations"]
    for violation in violations:
        click.echo(f"violation: {violation}", err=True)
    click.echo(f"{run_id}: {summary['steps']} steps, {len(violations)} violations in {summary['checks']} checks")
    for path in written:
        click.echo(path)
