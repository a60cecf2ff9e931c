"""What opens a run: everything that can be validated is, the run is created or found, and no process is started."""

from __future__ import annotations

import logging
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from sprawl import __version__
from sprawl.board.fence import FencedStore
from sprawl.board.ledger import Ledger, resolve_run
from sprawl.board.records import RunRecord
from sprawl.board.signing import Signer, Trust, environment_keys
from sprawl.board.store import Store, open_store
from sprawl.config import RunConfig, parse_config
from sprawl.delta.state import root_digest, served_view, tensor_digests
from sprawl.errors import ConfigError
from sprawl.policy import Tokenizer
from sprawl.policy.checkpoint import drop_tied_head, load_auxiliary, load_weights, read_architecture
from sprawl.policy.fetch import ensure_base
from sprawl.problems import load_problem_set
from sprawl.run.fleet import Fleet, FleetContext, open_fleet
from sprawl.run.launch import launched_processes
from sprawl.run.options import RunOptions, new_run_id

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedRun:
    """A run that is on its board and fits this launch. Nothing runs for it yet, and nobody is fenced off."""

    config: RunConfig
    board: str
    store: Store
    run_id: str
    resumed: bool
    log_dir: Path
    fleet: Fleet
    signer: Signer | None
    trust: Trust | None

    def take_over(self) -> TakenRun:
        """A new fencing epoch: whatever is written through the result stops when another process takes the run over."""
        epoch = Ledger(self.store, self.run_id).acquire_epoch()
        store = FencedStore(self.store, self.run_id, epoch)
        ledger = Ledger(store, self.run_id)
        return TakenRun(self.config, self.board, store, ledger, epoch, self.log_dir, self.signer, self.trust)


@dataclass(frozen=True)
class TakenRun:
    """A run that is this process's to go on with: `store` and `ledger` are fenced with `epoch`."""

    config: RunConfig
    board: str
    store: Store
    ledger: Ledger
    epoch: int
    log_dir: Path
    signer: Signer | None
    trust: Trust | None

    @property
    def run_id(self) -> str:
        return self.ledger.run_id


def open_run(options: RunOptions, anchor_argv: tuple[str, ...] | None = None) -> OpenedRun:
    """Raises SprawlError: missing board or run, wrong config, a base model that cannot be had, keys that do not fit."""
    signer, trust = environment_keys()
    if options.resume is not None:
        store = open_store(options.board)
        run_id = resolve_run(store, options.resume)
        config = parse_config(Ledger(store, run_id).run().config, f"run.json of {run_id}")
        _check_launch(config)
    else:
        if options.config is None:
            raise ConfigError("a new run needs a config", "give a YAML, or --resume RUN_ID")
        config = options.config
        _check_launch(config)
        run_id = options.run_id or new_run_id(config.name)
        base = _checked_base(config)
        store = open_store(options.board, create=True, probe=True)
        _create_run(store, run_id, config, base)
    log_dir = options.log_dir or Path.cwd() / ".sprawl" / "logs" / run_id
    context = FleetContext(options.board, run_id, config, log_dir, anchor_argv)
    return OpenedRun(
        config=config,
        board=options.board,
        store=store,
        run_id=run_id,
        resumed=options.resume is not None,
        log_dir=log_dir,
        fleet=open_fleet(options.fleet, context),
        signer=signer,
        trust=trust,
    )


def _check_launch(config: RunConfig) -> None:
    """Raises ConfigError when torchrun started another number of processes than the config needs."""
    launched, policy = launched_processes(), config.policy
    if launched not in (1, policy.processes):
        raise ConfigError(
            f"torchrun started {launched} processes; policy.runtime={policy.runtime}, stages={policy.stages} and "
            f"replicas={policy.replicas} need {policy.processes}",
            "change one of them, or start the run without torchrun",
        )


def _checked_base(config: RunConfig) -> Path:
    """The directory of the base model, once problem set, stages and tokenizer are known to work."""
    load_problem_set(config.problems.name, config.seed, config.problems.params)
    base = ensure_base(config.policy.base, Path("models"), log.info)
    files = load_auxiliary(base)
    arch = read_architecture(files)
    arch.split(config.policy.stages, config.policy.split)
    Tokenizer.from_files(files)
    return base


def _create_run(store: Store, run_id: str, config: RunConfig, base: Path) -> None:
    arch = read_architecture(load_auxiliary(base))
    weights = drop_tied_head(load_weights(base), arch)
    served = served_view(weights, config.publish.dtype)
    Ledger(store, run_id).create_run(
        RunRecord(
            run_id=run_id,
            created_at=time.time(),
            config=config.model_dump(mode="json"),
            base_digest=root_digest(tensor_digests(served)),
            parameters=sum(tensor.numel() for tensor in weights.values()),
            sprawl_version=__version__,
            host={"cores": os.cpu_count(), "platform": platform.platform(), "torch": torch.__version__},
        )
    )
