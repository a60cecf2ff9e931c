"""The trainer's side of the anchor circuit: which sign map a step uses, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch

from sprawl.anchor.forecast import checkpoints_needed
from sprawl.anchor.schedule import fires_before
from sprawl.anchor.service import read_bases, read_sign_map
from sprawl.board.ledger import Ledger
from sprawl.board.store import Store
from sprawl.config import AnchorConfig
from sprawl.errors import SprawlError

POLL_S = 0.05


class SignMaps:
    """The sign map in force. `fire` is the step of the fire it came from; `signs` is None until the first one and
    while M has no direction: gradients are then left as they are."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        config: AnchorConfig,
        shapes: dict[str, tuple[int, ...]],
        hint: str,
        names: Collection[str] | None = None,
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._config = config
        self._shapes = shapes
        self._hint = hint  # where to look when a fire does not come
        self._names = names  # keep the signs of these parameters only; None: of all
        self.signs: dict[str, torch.Tensor] | None = None
        self.fire: int | None = None
        self.weights_step: int | None = None  # of the newest weights that fire used
        self._next_fire = config.every  # no fire before it is missing
        self.bases: dict[int, torch.Tensor] | None = None  # of the same fire, with the subspace codec
        self.basis_bytes = 0
        self.requested: Collection[int] = ()  # fires asked for between the regular ones

    def take(self, step: int, idle: Callable[[], None]) -> int:
        """Pick up the newest sign map that optimizer step `step` may use; returns the bytes received, 0 without news.

        In blocking mode a due fire is waited for (`idle` is called meanwhile); otherwise what is there is taken.
        Raises SprawlError when a fire does not come within `anchor.timeout_s`.
        """
        news = fires_before(step, self.requested, self._config.every, self.fire or 0)
        if not self._config.enabled or not news:
            return 0
        if self._config.blocking:
            self.wait_for(news[0], idle)
        for fire in news:
            if self._ledger.fire(fire) is not None:
                return self.use(fire)
        return 0

    def use(self, fire: int | None) -> int:
        """Put the sign map of a committed fire into force (None: none); returns the bytes received.

        Raises SprawlError when it is gone from the board, IntegrityError when it is damaged.
        """
        if fire == self.fire:
            return 0
        if fire is None:
            self.signs, self.fire, self.weights_step, self.bases, self.basis_bytes = None, None, None, None, 0
            return 0
        found = read_sign_map(self._store, self._ledger, fire, self._shapes)
        if found is None:
            raise SprawlError(f"the sign map of fire {fire} is gone from the board of {self._ledger.run_id}")
        record, signs = found
        wanted = {name: sign for name, sign in signs.items() if self._names is None or name in self._names}
        self.signs = wanted if record.has_direction else None
        self.weights_step = record.newest_step
        self.bases = read_bases(self._store, self._ledger.run_id, record)
        self.basis_bytes = record.basis_bytes
        self.fire = fire
        return record.bytes

    def checkpoints_needed(self, steps: int, grid: int | None = None) -> set[int]:
        """Steps of the checkpoints that the anchor still reads, or may be asked to read, for a run of so many steps.
        `grid`: the distance at which fires may be asked for; None: nobody asks."""
        if not self._config.enabled:
            return set()
        while self._ledger.fire(self._next_fire) is not None:
            self._next_fire += self._config.every
        return checkpoints_needed(self._next_fire, steps, self._config, grid)

    def wait_for(self, fire: int, idle: Callable[[], None]) -> None:
        """Until the fire due at step `fire` is committed."""
        deadline = time.monotonic() + self._config.timeout_s
        while self._ledger.fire(fire) is None:
            idle()
            if time.monotonic() > deadline:
                raise SprawlError(
                    f"the anchor did not fire for step {fire} within {self._config.timeout_s:.0f} s", self._hint
                )
            time.sleep(POLL_S)
