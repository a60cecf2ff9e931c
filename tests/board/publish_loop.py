"""Publishes random small steps of one run for ever; the crash test kills it. Usage: publish_loop BOARD RUN_ID.

Deterministic: version v is the same state in every process, as a resumed trainer's would be.
"""

import sys

import torch

from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.delta.state import State


def state_of(version: int) -> State:
    state = {name: torch.zeros(2000, dtype=torch.bfloat16) for name in ("a", "b")}
    for step in range(version + 1):
        generator = torch.Generator().manual_seed(step)
        for tensor in state.values():
            where = torch.randint(0, 2000, (50,), generator=generator)
            tensor[where] = torch.randn(50, generator=generator).bfloat16()
    return state


def main() -> None:
    store = open_store(sys.argv[1], create=True)
    head = VersionReader(store, sys.argv[2]).head()
    # Starts one version early: a trainer that was killed does not know whether its last publish went through.
    version = 0 if head is None else head
    publisher = Publisher(store, sys.argv[2], keyframe_every=4, dtype="bfloat16", files={"config.json": b"{}"})
    print("ready", flush=True)
    while True:
        publisher.publish(version, version, state_of(version))
        version += 1


if __name__ == "__main__":
    main()
