"""What a board has of a study's cells: what state each is in, and whether it is still the same experiment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from sprawl.board.ledger import find_run
from sprawl.board.store import Store, open_store
from sprawl.config import RunConfig, parse_config
from sprawl.errors import ConfigError, SprawlError
from sprawl.report.data import RunData, load_run
from sprawl.study.plan import Cell

_HEAVY = ("manifests/", "merged/", "blobs/", "rollouts/", "anchor/signs/", "anchor/bases/", "anchor/state/")
"""What a finished run needs no more, manifests before the blobs they name; checkpoints come after."""


def open_board(board: str) -> Store | None:
    """The board, None when the directory does not exist yet (the first run creates it)."""
    if "://" not in board and not os.path.exists(board):
        return None
    return open_store(board)


def find_cell(store: Store | None, cell: Cell) -> RunData | None:
    """The ledger of a cell's run, None when it was never started."""
    if store is None or find_run(store, cell.run_id) is None:
        return None
    return load_run(store, cell.run_id)


def check_definitions(store: Store | None, cells: Sequence[Cell]) -> dict[str, RunData]:
    """The runs that are there already, by run id. Raises ConfigError when one of them is another experiment than its
    cell says: numbers of two definitions must not meet under one name."""
    known, errors = {}, []
    for cell in cells:
        data = find_cell(store, cell)
        if data is None:
            continue
        known[cell.run_id] = data
        changed = differences(data.run.config, cell.config, f"run.json of {cell.run_id}")
        if changed:
            errors.append(f"run {cell.run_id} was made with {', '.join(changed)}")
    if errors:
        more = f" (and {len(errors) - 3} more runs)" if len(errors) > 3 else ""
        raise ConfigError("; ".join(errors[:3]) + more, "give the changed arm or the study a new name")
    return known


def differences(recorded: Mapping[str, Any], wanted: RunConfig, source: str) -> list[str]:
    """`optimizer.lr=1e-05, now 3e-05` for every field that differs; fields that a record of an older release lacks
    have their defaults. Where the board is does not count, nor what a section says that is off in both."""
    before = _flat(_effective(parse_config(dict(recorded), source).model_dump(mode="json")))
    after = _flat(_effective(wanted.model_dump(mode="json")))
    return [
        f"{field}={before.get(field)!r}, now {after.get(field)!r}"
        for field in sorted(before.keys() | after.keys())
        if field != "board" and before.get(field) != after.get(field)
    ]


def keep_ledger_only(store: Store, run_id: str) -> int:
    """Delete a finished run's versions, rollouts, sign maps and checkpoints; returns the number of objects deleted.

    Its ledger (run.json, metrics, fires) stays, which is all that tables and figures read. Raises SprawlError when the
    run has not finished: it could not be resumed any more.
    """
    if not load_run(store, run_id).finished:
        raise SprawlError(f"run {run_id} has not finished: its checkpoints are needed to resume it")
    deleted = 0
    # Commit records of checkpoints lie beside the folders of their blobs: they go first.
    checkpoints = sorted(store.list(f"{run_id}/checkpoints/"), key=lambda key: not key.endswith(".json"))
    for keys in (*(store.list(f"{run_id}/{folder}") for folder in _HEAVY), checkpoints):
        for key in keys:
            store.delete(key)
            deleted += 1
    return deleted


def _effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sections with `enabled: false` say only that."""
    return {
        key: {"enabled": False} if isinstance(entry, Mapping) and entry.get("enabled") is False else entry
        for key, entry in config.items()
    }


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, entry in value.items():
        if isinstance(entry, Mapping) and key != "params":
            flat |= _flat(entry, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = entry
    return flat
