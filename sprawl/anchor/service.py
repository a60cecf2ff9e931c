"""The anchor circuit as a process: follows the board, fires when a fire is due, publishes sign(M).

It meets the trainer only at the board: it reads checkpoints (never newer than t - K) and rollouts, and writes a sign
map and a fire record. Fires happen strictly in order, because M folds; M itself is durable on the board before the
fire is committed, so a killed anchor continues where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from blake3 import blake3
from safetensors.torch import load, save

from sprawl.anchor import signmap
from sprawl.anchor.forecast import checkpoints_for, factors, project, replayed_step
from sprawl.anchor.replay import Replay, fold, replay
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
from sprawl.rollout.trajectories import load_batch
from sprawl.train.checkpoint import read_blob
from sprawl.train.codecs import BasisObserver, SubspaceCodec, make_codec

IDLE_S = 0.2


class AnchorService:
    """One run's anchor. Not thread-safe; one process owns it (a second one repeats the same fires harmlessly)."""

    def __init__(self, board: str, run_id: str) -> None:
        self.store: Store = open_store(board)
        self.ledger = Ledger(self.store, run_id)
        self.run_id = run_id
        record = self.ledger.run()
        self.config: RunConfig = parse_config(record.config, f"run.json of {run_id}")
        if not self.config.anchor.enabled:
            raise SprawlError(f"run {run_id} has anchor.enabled=false: it needs no anchor process")
        self._decoder: Decoder | None = None
        self._momentum: dict[str, torch.Tensor] | None = None
        self._momentum_step = 0  # the fire after which _momentum stands; 0: none yet

    def next_fire(self) -> int:
        """The optimizer step of the first fire that has not happened."""
        step = self.config.anchor.every
        done = {record.step for record in self.ledger.fires()}
        while step in done:
            step += self.config.anchor.every
        return step

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
        needed = checkpoints_for(step, self.config.anchor)
        if any(self.ledger.checkpoint(checkpoint) is None for checkpoint in needed):
            return None
        return step

    def fire(self, step: int) -> FireRecord:
        """Fire number `step / c`. Idempotent: a fire that was committed is returned as it is."""
        existing = self.ledger.fire(step)
        if existing is not None:
            return existing
        started = time.perf_counter()
        config = self.config.anchor
        used = checkpoints_for(step, config)
        replayed = replayed_step(step, config, self.config.rollout.max_staleness)
        batch = load_batch(self.store, self.run_id, replayed)
        decoder = self._model()
        decoder.load_served(self._weights(step, used), torch.float32)
        observer = self._observer(step)
        result = replay(decoder, batch, self.config, observer)
        if not math.isfinite(result.grad_norm):
            # Folding it in would poison M for good; the previous direction is the better one.
            result = Replay({n: torch.zeros_like(g) for n, g in result.gradients.items()}, result.loss, 0.0)
        momentum = fold(self._momentum_before(step), result.gradients, config.fold)
        # M is durable before the fire is committed: a restarted anchor folds on, never from scratch.
        self.store.put(keys.anchor_state(self.run_id, step), save(momentum))
        packed = signmap.encode_signs(momentum, step)
        digest = blake3(packed).hexdigest()
        self.store.put(keys.sign_map(self.run_id, step, digest), packed)
        bases = b""
        if observer is not None:
            bases = save({str(layer): basis.contiguous() for layer, basis in observer.refreshed().items()})
            self.store.put(keys.bases(self.run_id, step, blake3(bases).hexdigest()), bases)
        record = FireRecord(
            step=step,
            newest_step=used[0],
            checkpoints=used,
            forecast=config.forecast if len(used) > 1 else "stale",
            replayed_step=replayed,
            digest=digest,
            bytes=len(packed),
            header_bytes=signmap.HEADER_BYTES,
            parameters=sum(tensor.numel() for tensor in momentum.values()),
            grad_norm=result.grad_norm,
            loss=result.loss,
            basis_digest=blake3(bases).hexdigest() if bases else None,
            basis_bytes=len(bases),
            seconds=time.perf_counter() - started,
            finished_at=time.time(),
        )
        self.ledger.write_fire(record)
        self._momentum, self._momentum_step = momentum, step
        # The state two fires ago can no longer be needed: this fire is committed.
        self.store.delete(keys.anchor_state(self.run_id, step - 2 * config.every))
        return record

    def _weights(self, step: int, used: list[int]) -> dict[str, torch.Tensor]:
        """The weights that the fire replays at: the newest checkpoint, or the forecast from all of `used`."""
        newest = self._masters(used[0])
        older = map(self._masters, used[1:])  # read one at a time
        return project(newest, zip(factors(step, used, self.config.anchor), older, strict=True)) if used[1:] else newest

    def _masters(self, step: int) -> dict[str, torch.Tensor]:
        return read_blob(self.store, self.ledger, step, "masters")

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
        previous = self.ledger.fire(step - self.config.anchor.every)
        codec.use(read_bases(self.store, self.run_id, previous) if previous is not None else None)
        return BasisObserver(codec)

    def _momentum_before(self, step: int) -> dict[str, torch.Tensor] | None:
        """M after the previous fire: in memory, or the durable one after a restart."""
        previous = step - self.config.anchor.every
        if previous <= 0:
            return None
        if self._momentum is not None and self._momentum_step == previous:
            return self._momentum
        try:
            return load(self.store.get(keys.anchor_state(self.run_id, previous)))
        except MissingKey:
            raise IntegrityError(f"the anchor's state after fire {previous} is gone from the board") from None


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
