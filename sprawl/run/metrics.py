"""The trainer for Prometheus: what its newest step measured, and what it did since this process took the run over."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict

from sprawl.board.ledger import is_live
from sprawl.board.records import EvaluationRecord, EventRecord, IslandRecord, StepRecord
from sprawl.exposition import Labels, Page


class TrainerMetrics:
    """Fed by the run's thread, rendered by the endpoint's. Counters count from this process's start, as Prometheus
    expects: after a resume they begin at 0 again."""

    def __init__(self, run_id: str, steps_planned: int) -> None:
        self._run_id = run_id
        self._planned = steps_planned
        self._lock = threading.Lock()
        self._newest: StepRecord | None = None
        self._evaluation: EvaluationRecord | None = None
        self._epoch = 0
        self._steps: Counter[str] = Counter()
        self._tokens = 0
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: Counter[str] = Counter()

    def started(self, epoch: int, newest: StepRecord | None) -> None:
        """The run was taken over at `newest`, the last committed step (None for a new run)."""
        with self._lock:
            self._epoch, self._newest = epoch, newest

    def step(self, record: StepRecord) -> None:
        with self._lock:
            self._newest = record
            self._steps["applied" if record.applied else "refused"] += 1
            self._tokens += record.response_tokens
            for name, wire in (("boundary", record.boundary), ("delta", record.delta), ("sign", record.sign)):
                self._bytes[name, "sent"] += wire.sent
                self._bytes[name, "dense"] += wire.dense
            for phase, seconds in record.seconds.items():
                self._seconds[phase] += seconds

    def evaluation(self, record: EvaluationRecord) -> None:
        with self._lock:
            self._evaluation = record

    def event(self, record: EventRecord) -> None:
        with self._lock:
            self._events[record.kind] += 1

    def render(self, islands: list[IslandRecord], now: float | None = None) -> str:
        """Prometheus text. `islands`: those registered on the board; `now` in Unix seconds."""
        page = Page()
        with self._lock:
            self._run(page)
            if self._newest is not None:
                _measured(page, self._newest)
            if self._evaluation is not None:
                page.add("trainer_accuracy", "gauge", "Greedy accuracy, newest evaluation.", self._evaluation.accuracy)
                page.add("trainer_accuracy_version", "gauge", "Version it is of.", self._evaluation.version)
            self._counted(page)
        moment = time.time() if now is None else now
        states: dict[Labels, float] = {(("state", state),): 0.0 for state in ("live", "lost")}
        for island in islands:
            states[(("state", "live" if is_live(island, moment) else "lost"),)] += 1
        page.add("trainer_islands", "gauge", "Islands on the board, by their heartbeats.", states)
        return page.text()

    def _run(self, page: Page) -> None:
        page.add("trainer_info", "gauge", "Always 1; which run this is.", {(("run_id", self._run_id),): 1.0})
        page.add("trainer_epoch", "gauge", "Fencing epoch of this trainer.", self._epoch)
        page.add("trainer_steps_planned", "gauge", "Optimizer steps the run will have.", self._planned)
        step = 0 if self._newest is None else self._newest.step
        page.add("trainer_step", "gauge", "Newest committed optimizer step.", step)

    def _counted(self, page: Page) -> None:
        outcomes: dict[Labels, float] = {(("outcome", o),): self._steps[o] for o in ("applied", "refused")}
        page.add("trainer_steps_total", "counter", "Optimizer steps committed by this process.", outcomes)
        page.add("trainer_response_tokens_total", "counter", "Response tokens trained on.", self._tokens)
        wires = [(wire, what) for wire in ("boundary", "delta", "sign") for what in ("sent", "dense")]
        sizes: dict[Labels, float] = {(("wire", wire), ("what", what)): self._bytes[wire, what] for wire, what in wires}
        page.add("trainer_wire_bytes_total", "counter", "Bytes sent, and what dense would have cost.", sizes)
        seconds: dict[Labels, float] = {(("phase", p),): s for p, s in sorted(self._seconds.items())}
        page.add("trainer_phase_seconds_total", "counter", "Wall seconds in each phase of a step.", seconds)
        events: dict[Labels, float] = {(("kind", k),): n for k, n in sorted(self._events.items())}
        events.setdefault((("kind", "island_lost"),), 0.0)
        events.setdefault((("kind", "violation"),), 0.0)
        page.add("trainer_events_total", "counter", "Events written to the ledger.", events)


def _measured(page: Page, record: StepRecord) -> None:
    """Gauges of the newest step; a view that was not probed at it is left out."""

    def views(codec: float, dense: float | None) -> dict[Labels, float]:
        values: dict[Labels, float] = {(("view", "codec"),): codec}
        return values if dense is None else values | {(("view", "dense"),): dense}

    entropy, kl, mismatch = record.entropy, record.kl, views(record.mismatch, record.mismatch_dense)
    page.add("trainer_step_finished_timestamp_seconds", "gauge", "Unix time of it.", record.finished_at)
    page.add("trainer_reward", "gauge", "Mean verifier score of the batch.", record.reward)
    page.add("trainer_entropy", "gauge", "nats/token, by view.", views(entropy.compression, entropy.dense))
    page.add("trainer_kl", "gauge", "nats/token to the base, by view.", views(kl.compression, kl.dense))
    page.add("trainer_mismatch", "gauge", "nats/token, sampler to trainer, by view; watch its trend.", mismatch)
    page.add("trainer_grad_norm", "gauge", "Global L2 norm before clipping.", record.grad_norm)
    page.add("trainer_clip_share", "gauge", "Share of tokens whose ratio was clipped.", record.clip_share)
    page.add("trainer_response_length", "gauge", "Mean response tokens a sample.", record.response_length)
    page.add("trainer_sign_agreement", "gauge", "Share of gradient signs that agree with M.", record.sign_agreement)
    page.add("trainer_sign_age", "gauge", "Optimizer steps since the fire in use.", record.sign_age)
    page.add("trainer_staleness", "gauge", "Mean age of the rollouts, versions.", record.staleness)
    page.add("trainer_changed_share", "gauge", "Share of served weights that changed.", record.changed_share)
    page.add("trainer_step_seconds", "gauge", "Wall seconds of the step.", record.seconds.get("total"))
