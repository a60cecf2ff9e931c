"""The engines an island can run, by name: what each needs to be built, and where it wants the weights kept.

Others register a builder under the entry-point group `sprawl.engines`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from sprawl.board.directory_lock import hold
from sprawl.errors import SprawlError
from sprawl.rollout.engine import Engine
from sprawl.rollout.host_copy import DiskCopy, HostCopy, MemoryCopy

if TYPE_CHECKING:
    from sprawl.policy.tokenizer import Tokenizer
    from sprawl.rollout.listen import IslandSettings

CHECKPOINT = "checkpoint"
"""Name of the host copy's directory in an island's work directory."""

BUILTIN = {
    "torch": "sprawl.rollout.engines:embedded_torch",
    "vllm": "sprawl.rollout.vllm.equipment:vllm",
}


@dataclass(frozen=True)
class EngineContext:
    """What an island knows when it builds its engine. `files` are the checkpoint's besides its weights; `work_dir` is
    the island's alone; `keep`: the host copy is to be on disk there, whether or not the engine reads it."""

    run_id: str
    files: Mapping[str, bytes]
    tokenizer: Tokenizer
    compute_dtype: str
    threads: int
    arguments: str
    work_dir: Path
    keep: bool = False


@dataclass(frozen=True)
class Equipment:
    """An engine without weights, and the host copy that it is fed from."""

    engine: Engine
    copy: HostCopy


Builder = Callable[[EngineContext], Equipment]


def equip(name: str, context: EngineContext) -> Equipment:
    """Build the engine registered under `name`. Raises SprawlError when there is none, or it cannot run here."""
    if name in BUILTIN:
        module, _, function = BUILTIN[name].partition(":")
        builder: Builder = getattr(import_module(module), function)
        return builder(context)
    found = {entry.name: entry for entry in entry_points(group="sprawl.engines")}
    if name not in found:
        known = ", ".join(sorted({*BUILTIN, *found}))
        raise SprawlError(f"no engine named {name!r} is installed", f"--engine takes one of: {known}")
    registered: Builder = found[name].load()
    return registered(context)


@contextmanager
def work_directory(settings: IslandSettings, run_id: str) -> Iterator[Path]:
    """A directory that is this island's while it lives. One that `cache` names, or a named island's own, is found
    again; that of a nameless island goes with it.

    Raises SprawlError when another island has it, or it cannot be made.
    """
    if settings.cache is None and settings.island_id is None:
        temporary = tempfile.mkdtemp(prefix="sprawl-island-")
        try:
            yield Path(temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return
    named = Path(".sprawl") / "islands" / run_id / (settings.island_id or "")
    if settings.cache is None:
        yield named.absolute()
        return
    with hold(settings.cache):
        yield Path(settings.cache).absolute()


def embedded_torch(context: EngineContext) -> Equipment:
    """The embedded engine: torch in this process, weights copied from the host copy."""
    import torch

    from sprawl.rollout.torch_engine import TorchEngine

    if context.arguments:
        raise SprawlError("--engine-args: the torch engine takes none", "leave them out")
    torch.set_num_threads(context.threads)
    engine = TorchEngine.from_files(context.files, context.tokenizer, compute_dtype=context.compute_dtype)
    if not context.keep:
        return Equipment(engine, MemoryCopy())
    return Equipment(engine, DiskCopy(context.work_dir / CHECKPOINT, context.run_id, context.files))
