"""Publishes versions of one run until it is killed: the victim of the crash test.

Deterministic: version v is the same state in every process, as a resumed trainer's would be.
"""

from multiprocessing.connection import Connection

import torch

from sprawl.board.commit import CommitOptions
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.delta.codec import encode
from sprawl.delta.state import State


def state_of(version: int) -> State:
    state = {name: torch.zeros(2000, dtype=torch.bfloat16) for name in ("a", "b")}
    for step in range(version + 1):
        generator = torch.Generator().manual_seed(step)
        for tensor in state.values():
            where = torch.randint(0, 2000, (50,), generator=generator)
            tensor[where] = torch.randn(50, generator=generator).bfloat16()
    return state


def publish_forever(board: str, run_id: str, ready: Connection) -> None:
    store = open_store(board)
    head = VersionReader(store, run_id).head()
    # Starts with the newest version again: a killed trainer does not know whether its last publish went through.
    version = 0 if head is None else head
    publisher = Publisher(
        store, run_id, CommitOptions(keyframe_every=4, dtype="bfloat16", files={"config.json": b"{}"})
    )
    ready.send("ready")
    while True:
        publisher.publish(version, version, state_of(version))
        version += 1


# The fork server imports this module: victims inherit the loaded kernels, so that they die while publishing.
encode(state_of(0), state_of(1))
