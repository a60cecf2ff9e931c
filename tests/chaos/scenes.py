"""What a victim is doing when it is killed, and the states it does it with. Run in processes that the fork server
makes: it imports this module, so that victims inherit the compiled kernels and start in milliseconds."""

import asyncio
from pathlib import Path

import torch

from sprawl.board.commit import CommitOptions
from sprawl.board.local_copy import pull
from sprawl.board.merged import merge
from sprawl.board.parts import PartCommitter, PartWriter
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.retention import gc
from sprawl.board.store import Store, open_store
from sprawl.delta.codec import apply, decode, encode
from sprawl.delta.state import State, clone_state, root_digest, tensor_digests
from sprawl.interop.convert import export_run, import_layout
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.gate import Gate
from sprawl.rollout.host_copy import DiskCopy
from sprawl.rollout.reconciler import Reconciler

RUN = "run"
NEXT = "run-after"
EVERY = 4
FILES = {"config.json": b"{}"}
RESHAPED = 6  # from this version on a tensor has another shape


def state_of(version: int) -> State:
    """The same in every process. Two tensors move in every version, one keeps still, one changes its form once."""
    state: State = {name: torch.zeros(2000, dtype=torch.bfloat16) for name in ("a", "b")}
    for step in range(version + 1):
        generator = torch.Generator().manual_seed(step)
        for tensor in state.values():
            where = torch.randint(0, 2000, (60,), generator=generator)
            tensor[where] = torch.randn(60, generator=generator).bfloat16()
    state["still"] = torch.ones(300, dtype=torch.bfloat16)
    state["form"] = torch.ones(20 if version < RESHAPED else 30)
    return state


def root(version: int) -> str:
    return root_digest(tensor_digests(state_of(version)))


def publish(store: Store, version: int, run_id: str = RUN) -> None:
    writer = Publisher(store, run_id, CommitOptions(keyframe_every=EVERY, dtype="bfloat16", files=FILES))
    writer.publish(version, version, state_of(version))


def publish_parts(store: Store, version: int) -> None:
    state = state_of(version)
    split = [{name: state[name] for name in names} for names in (("a", "still"), ("b", "form"))]
    parts = [
        PartWriter(store, RUN, writer=f"rank-{rank}", keyframe_every=EVERY).write(version, owned)
        for rank, owned in enumerate(split)
    ]
    PartCommitter(
        store, RUN, CommitOptions(keyframe_every=EVERY, dtype="bfloat16", files=FILES, writer="rank-0")
    ).commit(version, version, parts)


async def follow(reader: VersionReader, folder: str, version: int) -> None:
    """An island without HTTP and without a model: its cache, its gate, its reconciler."""
    wake, engine = asyncio.Event(), FakeEngine()
    gate = Gate("in_place", wake, run_id=reader.run_id)
    cache = DiskCopy(Path(folder), reader.run_id, FILES)
    reconciler = Reconciler(reader, engine, gate, follow="eager", wake=wake, poll_s=0.01, copy=cache)
    try:
        while gate.version != version:
            await reconciler.advance()
    finally:
        cache.close()


def play(scene: str, board: str, folder: str, version: int) -> None:
    """Do once what the scene says, from a cold start, as a restarted process would."""
    store = open_store(board, create=True)
    reader = VersionReader(store, RUN)
    match scene:
        case "publish":
            publish(store, version)
        case "parts":
            publish_parts(store, version)
        case "pull":
            pull(reader, folder, version)
        case "island":
            asyncio.run(follow(reader, folder, version))
        case "next run":
            asyncio.run(follow(VersionReader(store, NEXT), folder, version))
        case "merge":
            merge(reader, 0, version)
        case "gc":
            gc(store, RUN, 1)
        case "export":
            export_run(reader, open_store(folder, create=True), last=version)
        case "import":
            import_layout(open_store(folder), store, run_id=RUN, keyframe_every=EVERY)
        case _:
            raise ValueError(scene)


def victim(scene: str, board: str, folder: str, version: int, deadly: int) -> None:
    from tests.chaos.points import arm

    arm(deadly)
    play(scene, board, folder, version)


def _warm_up() -> None:
    base, new = state_of(0), state_of(1)
    apply(clone_state(base), decode(base, encode(base, new).blob))


_warm_up()
