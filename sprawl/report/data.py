"""Everything a report reads of one run, in memory. `load_run` is the only I/O of the report's input side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sprawl.board.records import EvaluationRecord, EventRecord, FireRecord, IslandRecord, RunRecord, StepRecord

if TYPE_CHECKING:
    from sprawl.board.store import Store

RunState = Literal["finished", "running", "stopped"]


@dataclass(frozen=True)
class RunData:
    """The ledger of a run, every list in order. `since`: the first step that was read; of a long run a watcher keeps
    the newest ones only, and what is said about steps is said about those."""

    run: RunRecord
    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[EvaluationRecord, ...] = ()
    fires: tuple[FireRecord, ...] = ()
    events: tuple[EventRecord, ...] = ()
    islands: tuple[IslandRecord, ...] = ()
    since: int = 1

    @classmethod
    def of(
        cls,
        run: RunRecord,
        steps: Iterable[StepRecord] = (),
        evaluations: Iterable[EvaluationRecord] = (),
        fires: Iterable[FireRecord] = (),
        events: Iterable[EventRecord] = (),
        islands: Iterable[IslandRecord] = (),
        *,
        since: int = 1,
    ) -> RunData:
        """Records in any order."""
        return cls(
            run=run,
            steps=tuple(sorted(steps, key=lambda record: record.step)),
            evaluations=tuple(sorted(evaluations, key=lambda record: record.version)),
            fires=tuple(sorted(fires, key=lambda record: record.step)),
            events=tuple(sorted(events, key=lambda record: record.at)),
            islands=tuple(sorted(islands, key=lambda record: record.island_id)),
            since=since,
        )

    @property
    def last_step(self) -> int:
        """The newest optimizer step on the ledger, 0 before the first."""
        return self.steps[-1].step if self.steps else 0

    @property
    def finished(self) -> bool:
        """A finish event was written and no step came after it (a run may be resumed for more steps)."""
        return any(event.kind == "finish" and event.step >= self.last_step for event in self.events)

    @property
    def codec_steps(self) -> tuple[StepRecord, ...]:
        """The steps that say something about the boundary codec: all but a compressed run's dense ones, if it has
        others."""
        if self.setting("boundary.codec") == "dense":
            return self.steps
        return tuple(record for record in self.steps if not record.dense_step) or self.steps

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the run's config by dotted path; `default` when a record of another release lacks it."""
        value: Any = self.run.config
        for part in path.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    def island_ids(self) -> list[str]:
        """Every island that registered, reported or sampled, replaced ones included."""
        ids = {record.island_id for record in self.islands}
        ids.update(name for record in self.steps for name in record.islands)
        ids.update(
            str(event.data["island_id"])
            for event in self.events
            if event.kind == "island_report" and "island_id" in event.data
        )
        return sorted(ids)

    def last_result(self) -> float:
        """Unix seconds of the newest step, evaluation, fire or finish. Heartbeats do not count."""
        return max(
            [
                self.run.created_at,
                *(record.finished_at for record in self.steps),
                *(record.finished_at for record in self.evaluations),
                *(record.finished_at for record in self.fires),
                *(event.at for event in self.events if event.kind == "finish"),
            ]
        )

    def last_sign_of_life(self) -> float:
        """Unix seconds of the newest thing anybody wrote about this run."""
        return max(
            [
                self.last_result(),
                *(event.at for event in self.events),
                *(record.heartbeat_at for record in self.islands),
            ]
        )

    def state(self, now: float) -> RunState:
        """running: something was written within a minute, or within five of the newest steps' time."""
        if self.finished:
            return "finished"
        pace = max((record.seconds.get("total", 0.0) for record in self.steps[-5:]), default=0.0)
        return "running" if now - self.last_sign_of_life() < max(60.0, 5 * pace) else "stopped"


def load_run(store: Store, run_id: str) -> RunData:
    """Read the whole ledger of a run. Raises BoardError when the run is not on this board."""
    from sprawl.board.ledger import Ledger

    ledger = Ledger(store, run_id)
    return RunData.of(
        ledger.run(), ledger.steps(), ledger.evaluations(), ledger.fires(), ledger.events(), ledger.islands()
    )


def load_roots(store: Store, run_id: str, versions: Iterable[int]) -> dict[int, str]:
    """Root digests of the versions whose manifests are still on the board (retention may have removed some)."""
    from sprawl.board.reader import VersionReader

    reader = VersionReader(store, run_id)
    roots = {}
    for version in versions:
        manifest = reader.manifest(version)
        if manifest is not None:
            roots[version] = manifest.root_digest
    return roots
