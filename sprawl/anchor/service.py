"""The anchor circuit as a process: follows the board, fires when a fire is due, publishes sign(M).

It meets the trainer only at the board: it reads checkpoints (never newer than t - K) and rollouts, and writes a sign
map and a fire record. Fires happen strictly in order, because M folds; M itself is durable on the board before the
fire is committed, so a killed anchor continues where it was. The record says which M that is: a second anchor, which
may have other bits, goes on from what was committed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from blake3 import blake3
from safetensors.torch import load, save

from sprawl.anchor import signmap
from sprawl.anchor.forecast import checkpoints_for, factors, project, replayed_step
from sprawl.anchor.replay import fold, matching_rows, replay, zeros_like
from sprawl.anchor.schedule import fires_before, open_requests
from sprawl.anchor.state import forget_states, read_state, write_state
from sprawl.anchor.untouched import watch
from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.reader import VersionReader
from sprawl.board.records import FireRecord
from sprawl.board.signing import environment_trust
from sprawl.board.store import MissingKey, Store, open_store
from sprawl.config import RunConfig, parse_config
from sprawl.errors import IntegrityError, SprawlError
from sprawl.policy import Decoder
from sprawl.policy.checkpoint import read_architecture
from sprawl.rollout.trajectories import RolloutBatch, load_batch
from sprawl.train.chains import MastersReader
from sprawl.train.codecs import BasisObserver, SubspaceCodec, make_codec
from sprawl.train.masters import DeltaPlan

IDLE_S = 0.2


@dataclass(frozen=True)
class _Replayed:
    """Rows [m] int64 of a batch."""

    batch: RolloutBatch
    rows: torch.Tensor

    @property
    def versions(self) -> list[int] | None:
        """Oldest and newest version that sampled them; None without rows."""
        if not len(self.rows):
            return None
        return [int(self.batch.version_start[self.rows].min()), int(self.batch.version_end[self.rows].max())]


class AnchorService:
    """One run's anchor. Not thread-safe; one process owns it. A second one is harmless: who commits a fire first has
    made it, and the other one goes on from there."""

    def __init__(self, board: str | Store, run_id: str) -> None:
        self.store: Store = open_store(board) if isinstance(board, str) else board
        self.ledger = Ledger(self.store, run_id)
        self.run_id = run_id
        record = self.ledger.run()
        self.config: RunConfig = parse_config(record.config, f"run.json of {run_id}")
        if not self.config.anchor.enabled:
            raise SprawlError(f"run {run_id} has anchor.enabled=false: it needs no anchor process")
        self._decoder: Decoder | None = None
        self._momentum: dict[str, torch.Tensor] | None = None
        self._momentum_step = 0  # the fire after which _momentum stands; 0: none yet
        self._next_fire = self.config.anchor.every  # no fire before it is missing
        self._masters = MastersReader(self.store, self.ledger)
        self._plan = DeltaPlan.of(self.config)

    def next_fire(self) -> int:
        """The optimizer step of the first fire that has not happened."""
        while self.ledger.fire(self._next_fire) is not None:
            self._next_fire += self.config.anchor.every
        asked = open_requests(self._requested(), self._next_fire, self.config.anchor.every)
        return next((step for step in asked if self.ledger.fire(step) is None), self._next_fire)

    def _requested(self) -> list[int]:
        """Fires between the regular ones; only the drift controller asks for any."""
        return self.ledger.fire_requests() if self.config.control.enabled else []

    def _fire_before(self, step: int) -> int | None:
        return next(iter(fires_before(step, self._requested(), self.config.anchor.every)), None)

    def finished(self) -> bool:
        """Whether the run needs no further fire."""
        return self.next_fire() > self.config.steps

    def poll(self) -> int | None:
        """The step of the next fire if everything it reads is on the board, else None."""
        step = self.next_fire()
        if step > self.config.steps:
            return None
        # The manifest is the commit point of optimizer step `step`; its rollouts were durable before.
        if not self.store.exists(keys.manifest(self.run_id, step)):
            return None
        # An earlier fire may have been asked for since the first look, but not since the commit: requests come first.
        if self.next_fire() != step:
            return None
        needed = checkpoints_for(step, self.config.anchor)
        if any(self.ledger.checkpoint(checkpoint) is None for checkpoint in needed):
            return None
        return step

    def fire(self, step: int) -> FireRecord:
        """The fire due at `step`. Idempotent: a fire that was committed is returned as it is, also when another anchor
        commits it meanwhile."""
        existing = self.ledger.fire(step)
        if existing is not None:
            return existing
        try:
            return self._fire(step)
        except (MissingKey, IntegrityError):
            # What a fire reads is dropped some time after its commit: another anchor may be that far ahead.
            committed = self.ledger.fire(step)
            if committed is None:
                raise
            return committed

    def _fire(self, step: int) -> FireRecord:
        started = time.perf_counter()
        used = checkpoints_for(step, self.config.anchor)
        read_before = self._masters.bytes_read
        decoder = self._model()
        decoder.load_served(self._weights(step, used), torch.float32)
        replayed = self._choose_rollouts(step, used[0])
        observer = self._observer(step)
        with watch(decoder) as watched:
            result = replay(decoder, replayed.batch, self.config, observer, replayed.rows)
        momentum = self._momentum_before(step) or zeros_like(result.gradients)
        if math.isfinite(result.grad_norm) and len(replayed.rows):
            momentum = fold(momentum, result.gradients, self.config.anchor.fold)
        # else M stays: a gradient that is not finite would poison it for good, and no rollouts say nothing.
        # M is durable before the fire is committed: a restarted anchor folds on, never from scratch.
        state = write_state(self.store, self.run_id, step, momentum)
        packed = signmap.encode_signs(momentum, step)
        digest = blake3(packed).hexdigest()
        self.store.put(keys.sign_map(self.run_id, step, digest), packed)
        bases = b""
        if observer is not None:
            bases = save({str(layer): basis.contiguous() for layer, basis in observer.refreshed().items()})
            self.store.put(keys.bases(self.run_id, step, blake3(bases).hexdigest()), bases)
        record = FireRecord(
            step=step,
            kind="extra" if step % self.config.anchor.every else "scheduled",
            newest_step=used[0],
            checkpoints=used,
            checkpoint_bytes=self._masters.bytes_read - read_before,
            forecast=self.config.anchor.forecast if len(used) > 1 else "stale",
            replayed_step=replayed.batch.step,
            replayed_versions=replayed.versions,
            replayed_samples=len(replayed.rows),
            digest=digest,
            state_digest=state,
            bytes=len(packed),
            header_bytes=signmap.HEADER_BYTES,
            parameters=sum(tensor.numel() for tensor in momentum.values()),
            grad_norm=result.grad_norm,
            loss=result.loss,
            basis_digest=blake3(bases).hexdigest() if bases else None,
            basis_bytes=len(bases),
            has_direction=any(bool(tensor.any()) for tensor in momentum.values()),
            optimizer_steps=watched.optimizer_steps,
            weights_before=watched.before,
            weights_after=watched.after,
            seconds=time.perf_counter() - started,
            finished_at=time.time(),
        )
        if self.ledger.write_fire(record):
            committed = record
        else:
            found = self.ledger.fire(step)
            assert found is not None, "a record that kept ours from being created"
            committed = found
        self._momentum, self._momentum_step = (momentum, step) if committed.state_digest == state else (None, 0)
        self._forget(step, used)
        return committed

    def _weights(self, step: int, used: list[int]) -> dict[str, torch.Tensor]:
        """The weights that the fire replays at: the newest checkpoint, or the forecast from all of `used`."""
        # Oldest first: each is a delta against the one before.
        states = {at: self._masters.read(at) for at in reversed(used)}
        if len(used) == 1:
            return states[used[0]]
        ahead = factors(step, used, self.config.anchor)
        return project(states[used[0]], zip(ahead, (states[at] for at in used[1:]), strict=True))

    def _choose_rollouts(self, step: int, version: int) -> _Replayed:
        """The newest batch; or, with matching replay, the groups that `version` sampled, of the batch with most of
        them. In deterministic mode that is one known batch, whole."""
        anchor, staleness = self.config.anchor, self.config.rollout.max_staleness
        newest = replayed_step(step, anchor, staleness)
        if anchor.replay == "newest":
            batch = load_batch(self.store, self.run_id, newest)
            return _Replayed(batch, torch.arange(batch.samples))
        best: _Replayed | None = None
        for at in range(newest, max(0, newest - 1 - staleness), -1):
            batch = load_batch(self.store, self.run_id, at)
            found = _Replayed(batch, matching_rows(batch, version))
            if best is None or len(found.rows) > len(best.rows):
                best = found
            if len(best.rows) == batch.samples:
                break
        assert best is not None  # newest is at least 1
        return best

    def _forget(self, step: int, used: list[int]) -> None:
        """Drop what no later fire needs: checkpoints in memory, and M of all but the newest fires (a second anchor may
        still be folding on the one before)."""
        following = checkpoints_for(step + self.config.anchor.every, self.config.anchor)
        coming = [at for at in following if at not in used]
        bases = {base for at in coming if (base := self._plan.base(at)) is not None}
        self._masters.hold({at for at in used if at in following or at in bases})
        forget_states(self.store, self.ledger, step, step - self.config.anchor.every)

    def _model(self) -> Decoder:
        if self._decoder is None:
            files = VersionReader(self.store, self.run_id, trust=environment_trust()).files()
            self._decoder = Decoder(read_architecture(files))
        return self._decoder

    def _observer(self, step: int) -> BasisObserver | None:
        """With the subspace codec: refreshes the bases of the fire before this one, at first the initial ones."""
        codec = make_codec(self.config.boundary, self.config.seed)
        if not isinstance(codec, SubspaceCodec):
            return None
        before = self._fire_before(step)
        previous = None if before is None else self.ledger.fire(before)
        codec.use(read_bases(self.store, self.run_id, previous) if previous is not None else None)
        return BasisObserver(codec)

    def _momentum_before(self, step: int) -> dict[str, torch.Tensor] | None:
        """M after the previous fire: in memory, or the durable one after a restart."""
        previous = self._fire_before(step)
        if previous is None:
            return None
        if self._momentum is not None and self._momentum_step == previous:
            return self._momentum
        record = self.ledger.fire(previous)
        if record is None:
            raise IntegrityError(f"fire {previous} is gone from the board: fire {step} goes on from it")
        return read_state(self.store, self.run_id, record)


def read_sign_map(
    store: Store, ledger: Ledger, step: int, shapes: dict[str, tuple[int, ...]]
) -> tuple[FireRecord, dict[str, torch.Tensor]] | None:
    """The sign map of the fire at `step`, digest checked, or None while that fire is not committed."""
    record = ledger.fire(step)
    if record is None:
        return None
    data = store.get(keys.sign_map(ledger.run_id, step, record.digest))
    if blake3(data).hexdigest() != record.digest:
        raise IntegrityError(f"sign map of fire {step}: its bytes are not the committed ones ({record.digest[:16]})")
    return record, signmap.decode_signs(data, shapes)[1]


def read_bases(store: Store, run_id: str, record: FireRecord) -> dict[int, torch.Tensor] | None:
    """Boundary -> Q of a fire, digest checked; None when the run's codec has no bases."""
    if record.basis_digest is None:
        return None
    data = store.get(keys.bases(run_id, record.step, record.basis_digest))
    if blake3(data).hexdigest() != record.basis_digest:
        raise IntegrityError(
            f"bases of fire {record.step}: their bytes are not the committed ones ({record.basis_digest[:16]})"
        )
    return {int(layer): basis for layer, basis in load(data).items()}


def serve(
    service: AnchorService,
    on_fire: Callable[[int], FireRecord] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Fire until the run needs no further fire. `on_fire` replaces `service.fire` (to wrap it in a task)."""
    act = on_fire or service.fire
    while not should_stop() and not service.finished():
        step = service.poll()
        if step is None:
            time.sleep(IDLE_S)
        else:
            act(step)
