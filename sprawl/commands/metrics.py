"""`sprawl metrics`: a run's numbers for other tools."""

from __future__ import annotations

from pathlib import Path

import click

from sprawl.commands.options import run_on_board, size


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def metrics() -> None:
    """Numbers of a run for notebooks, TensorBoard and dashboards."""


@metrics.command()
@run_on_board
@click.option(
    "--parquet",
    "parquet_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the steps as a parquet file here.",
)
@click.option("--tensorboard", "tensorboard_dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Write TensorBoard events to DIR/<run_id> here.")  # fmt: skip
def export(run_id: str, board: str, parquet_file: Path | None, tensorboard_dir: Path | None) -> None:
    """Write the steps of RUN_ID (default: latest) as parquet and as TensorBoard events.

    Both follow from the ledger: run it again at any time, no step is ever there twice. Without --parquet and
    --tensorboard they are brought up to date on the board itself, where a run keeps them every 20 steps when the
    extra `metrics` is installed (metrics/steps.parquet and metrics/tensorboard/).

    \b
    Examples:
      sprawl metrics export                                   on the board of the newest run
      sprawl metrics export RUN --parquet steps.parquet       for a notebook: pandas, polars, duckdb
      sprawl metrics export RUN --tensorboard tb && tensorboard --logdir tb
      tensorboard --logdir runs                               all runs of a board that is a directory
    """
    from sprawl.board.ledger import Ledger, resolve_run
    from sprawl.board.reader import VersionReader
    from sprawl.board.store import open_store
    from sprawl.errors import file_failure
    from sprawl.report.data import load_run
    from sprawl.report.export import parquet, tensorboard
    from sprawl.report.export.board import export_to_board

    parquet.arrow()
    tensorboard.protos()
    store = open_store(board)
    name = resolve_run(store, run_id)
    head = VersionReader(store, name).head() or 0
    if parquet_file is None and tensorboard_dir is None:
        export_to_board(store, name, head, rest=load_run(store, name).finished)
        click.echo(f"{name}: metrics/steps.parquet and metrics/tensorboard on board {store.url}")
        return
    ledger = Ledger(store, name)
    table = parquet.up_to_date(ledger, head, parquet.read_parquet(store, name))
    if parquet_file is not None:
        data = parquet.encode(table)
        try:
            parquet_file.parent.mkdir(parents=True, exist_ok=True)
            parquet_file.write_bytes(data)
        except OSError as error:
            raise file_failure("write", parquet_file, error) from None
        click.echo(f"{parquet_file}: {table.num_rows} steps, {len(table.column_names)} columns, {size(len(data))}")
    if tensorboard_dir is not None:
        folder = tensorboard_dir / name
        written = tensorboard.sync(
            open_store(str(folder), create=True),
            "",
            table.num_rows,
            lambda first, last: table.slice(first - 1, last - first + 1).to_pylist(),
            ledger.evaluations(),
            rest=True,
        )
        click.echo(f"{folder}: {len(written)} new event files")
