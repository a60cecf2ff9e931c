"""Evidence that a replay changed no weights and stepped no optimizer: both are measured, neither is assumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from sprawl.delta.state import root_digest, tensor_digests


@dataclass
class Watched:
    """`before`, `after`: root digests of a module's parameters. `optimizer_steps`: steps of any torch optimizer that
    this process took in between. Complete when the watch has ended."""

    before: str
    after: str = ""
    optimizer_steps: int = 0


@contextmanager
def watch(module: nn.Module) -> Iterator[Watched]:
    """Watch the parameters of `module`, and all optimizers of the process."""
    watched = Watched(weights_digest(module))

    def count(*_: object) -> None:
        watched.optimizer_steps += 1

    handle = register_optimizer_step_post_hook(count)
    try:
        yield watched
    finally:
        handle.remove()
        watched.after = weights_digest(module)


def weights_digest(module: nn.Module) -> str:
    """Root digest of a module's parameters by name: every bit of them counts."""
    return root_digest(tensor_digests({name: p.detach().cpu() for name, p in module.named_parameters()}))
