"""`sprawl board`: look at, verify and clean boards; the other commands of the group are in their own modules."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from sprawl.commands.board_exchange import export_command, import_command, keygen
from sprawl.commands.board_versions import merge, pull
from sprawl.commands.options import size, trusted_keys

if TYPE_CHECKING:
    from sprawl.board.store import Store
    from sprawl.board.verify import VerifyReport


def _default_board() -> str:
    return os.environ.get("SPRAWL_BOARD", "runs")


def _split(url: str, run_id: str | None) -> tuple[Store, str | None]:
    """Open `<board>` or `<board>/<run_id>`."""
    from sprawl.board.store import open_store

    store = open_store(url)
    if run_id is None and "manifests" in store.children(""):
        parent, _, name = url.rstrip("/").rpartition("/")
        return open_store(parent or "."), name
    return store, run_id


@click.group()
def board() -> None:
    """Look at, verify, fetch, exchange and clean boards.

    A board is where a run keeps its policy versions and records: a directory, or an object-store URL (s3://...).

    \b
    Examples:
      sprawl board ls                          runs on the default board ($SPRAWL_BOARD, else ./runs)
      sprawl board verify runs                 rebuild every version of every run, bit for bit
      sprawl board verify s3://bucket/runs tiny-0412
      sprawl board gc runs tiny-0412 --keep 40 --dry-run
      sprawl board pull runs latest ./model    the newest version as a Hugging Face checkpoint
      sprawl board import /shared/updates runs --base ./model    what slime, miles or stitch wrote
    """


for _command in (pull, merge, import_command, export_command, keygen):
    board.add_command(_command)


@board.command("ls")
@click.argument("url", required=False, metavar="[BOARD]")
def list_command(url: str | None) -> None:
    """List the runs on a board, newest first, with their newest version and live islands.

    \b
    Examples:
      sprawl board ls
      sprawl board ls s3://bucket/runs
    """
    from rich.console import Console
    from rich.table import Table

    from sprawl.board.ledger import Ledger, is_live, list_runs
    from sprawl.board.reader import VersionReader
    from sprawl.board.store import open_store

    store = open_store(url or _default_board())
    runs = list_runs(store)
    if not runs:
        click.echo(f"board {store.url} has no runs")
        return
    table = Table("run", "created", "version", "of", "islands", box=None, pad_edge=False)
    for run in runs:
        head = VersionReader(store, run.run_id).head()
        live = sum(is_live(island) for island in Ledger(store, run.run_id).islands())
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created_at))
        table.add_row(run.run_id, created, str(head), str(run.config.get("steps", "?")), str(live))
    Console().print(table)


@board.command()
@click.argument("url", metavar="BOARD")
@click.argument("run_id", required=False)
@trusted_keys
def verify(url: str, run_id: str | None, trusted: str | None) -> None:
    """Rebuild every published version and compare it with its root digest.

    Follows the deltas from each keyframe to the next, and merged deltas, and checks that they arrive at the same state.
    With --trusted, unsigned versions and those of other writers are damage. Checks one run,
    or every run when RUN_ID is left out (`latest` is the newest). BOARD may also be BOARD/RUN_ID. Exits with 1 when
    something is damaged; the lines name the version and the object.

    \b
    Examples:
      sprawl board verify runs
      sprawl board verify runs latest
      sprawl board verify runs/tiny-0412
    """
    from sprawl.board.ledger import resolve_run
    from sprawl.board.signing import trust_from
    from sprawl.board.verify import verify_board
    from sprawl.errors import BoardError

    store, run_id = _split(url, run_id)
    if run_id == "latest":
        run_id = resolve_run(store, run_id)
    names = [run_id] if run_id else [n for n in store.children("") if "manifests" in store.children(f"{n}/")]
    if not names:
        raise BoardError(f"board {store.url} has no runs with published versions", "give the board a run writes to")
    trust = trust_from(trusted)
    failed = False
    for name in names:
        report = verify_board(store, name, _show_progress(name), trust=trust)
        _print_report(report)
        failed |= not report.ok
    if failed:
        sys.exit(1)


def _show_progress(name: str) -> Callable[[int, int], None] | None:
    """One line that is rewritten, on a terminal only."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        click.echo(f"\r{name}: {done} of {total} versions", nl=done == total, err=True)

    return show


def _print_report(report: VerifyReport) -> None:
    verdict = "OK" if report.ok else f"{len(report.problems)} problem{'s' if len(report.problems) != 1 else ''}"
    merged = f", {report.merged} merged deltas" if report.merged else ""
    click.echo(
        f"{report.run_id}: {report.versions} of {report.published} versions rebuilt and equal, "
        f"{report.keyframes} keyframes{merged}, {size(report.bytes_read)} read: {verdict}"
    )
    for problem in report.problems:
        click.echo(f"  {problem}")


@board.command()
@click.argument("url", metavar="BOARD")
@click.argument("run_id")
@click.option("--keep", type=click.IntRange(min=1), required=True, help="Newest versions to keep.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
def gc(url: str, run_id: str, keep: int, dry_run: bool) -> None:
    """Delete old versions of a run; never one that is still needed.

    Kept are the newest KEEP versions, whatever live islands serve, and the keyframe that those start from; of the
    anchor's sign maps, those that a run resumed from a checkpoint takes. Records, rollouts and checkpoints stay.

    \b
    Examples:
      sprawl board gc runs latest --keep 40 --dry-run
      sprawl board gc s3://bucket/runs tiny-0412 --keep 40
    """
    from sprawl.board.ledger import resolve_run
    from sprawl.board.retention import gc as collect
    from sprawl.board.store import open_store

    store = open_store(url)
    if run_id == "latest":
        run_id = resolve_run(store, run_id)
    report = collect(store, run_id, keep, dry_run=dry_run)
    verb = "would delete" if dry_run else "deleted"
    click.echo(
        f"{run_id}: {verb} {len(report.plan.versions)} versions and {report.blobs} blobs "
        f"({size(report.bytes)}); kept from version {report.plan.keep_from}: {report.plan.reason}"
    )
