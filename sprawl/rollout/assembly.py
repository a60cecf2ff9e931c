"""What an island needs to serve one run, built from the run's record and the files on its board."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sprawl.board.local_files import fetch_files
from sprawl.board.reader import VersionReader
from sprawl.board.records import RunRecord
from sprawl.policy.tokenizer import Tokenizer
from sprawl.rollout.engines import CHECKPOINT, EngineContext, Equipment, equip
from sprawl.rollout.listen import IslandSettings
from sprawl.rollout.targets import Follow


@dataclass(frozen=True)
class Parts:
    """Of one run, without weights."""

    record: RunRecord
    reader: VersionReader
    files: Mapping[str, bytes]
    tokenizer: Tokenizer
    equipment: Equipment
    follow: Follow
    poll_s: float


def assemble(settings: IslandSettings, record: RunRecord, reader: VersionReader, work_dir: Path, *, own: bool) -> Parts:
    """Fetch the files and build the engine. Blocking.

    `own`: the cache on disk is this run's to write in; the checkpoint of another run keeps its files until it is
    replaced. Raises SprawlError when the run cannot be served here.
    """
    rollout = record.config.get("rollout", {})
    files = _cached_files(reader, work_dir / CHECKPOINT) if own and settings.cache is not None else reader.files()
    tokenizer = Tokenizer.from_files(files)
    context = EngineContext(
        run_id=record.run_id,
        files=files,
        tokenizer=tokenizer,
        compute_dtype=settings.compute_dtype or rollout.get("compute_dtype", "float32"),
        threads=settings.threads or record.config.get("threads", {}).get("island", 1),
        arguments=settings.engine_args,
        work_dir=work_dir,
        keep=settings.cache is not None,
    )
    equipment = equip(settings.engine or rollout.get("engine", "torch"), context)
    follow: Follow = settings.follow or rollout.get("follow", "eager")
    poll_s = 1.0 if _is_remote(settings.board) else 0.2
    return Parts(record, reader, files, tokenizer, equipment, follow, poll_s)


def _cached_files(reader: VersionReader, directory: Path) -> dict[str, bytes]:
    return fetch_files(reader, directory, reader.require(reader.require_head()))


def _is_remote(board: str) -> bool:
    scheme, separator, _ = board.partition("://")
    return bool(separator) and scheme not in ("file", "local", "memory")
