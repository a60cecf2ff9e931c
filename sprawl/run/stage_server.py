"""Every process of a trainer but the first: `python -m sprawl.run.stage_server`, with torchrun's environment.

It does what rank 0 says and reads what it needs from the board. When rank 0 or any other process is gone, it ends.
"""

from __future__ import annotations

import logging
import sys
import traceback

import torch
import torch.distributed as dist

from sprawl.board.fence import FencedStore
from sprawl.board.ledger import Ledger
from sprawl.board.signing import environment_trust
from sprawl.board.store import open_store
from sprawl.config import parse_config
from sprawl.errors import SprawlError
from sprawl.policy import Decoder
from sprawl.rollout.trajectories import load_batch
from sprawl.run.base_model import BaseModel
from sprawl.run.launch import follow
from sprawl.run.signs import SignMaps
from sprawl.run.stage_share import StageShare
from sprawl.train.runtime.control import Message
from sprawl.train.steering import Steering


class StageServer:
    """Opened by rank 0's first command; `handle` turns a command into an answer."""

    def __init__(self, command: Message) -> None:
        trust = environment_trust()
        store = FencedStore(open_store(command["board"]), command["run_id"], command["epoch"])
        self._ledger = Ledger(store, command["run_id"])
        config = parse_config(self._ledger.run().config, f"run.json of {command['run_id']}")
        torch.set_num_threads(config.threads.trainer)
        base = BaseModel.load(config)
        self._store = store
        self._share = StageShare(config, store, self._ledger, base, trust)
        with torch.device("meta"):
            shapes = Decoder(base.arch).shapes()
        mine = {name for name, _ in self._share.trainer.decoder.named_parameters()}
        self._signs = SignMaps(store, self._ledger, config.anchor, shapes, "", names=mine)

    def handle(self, command: Message) -> Message:
        what = command["do"]
        if what == "train":
            self._signs.use(command["fire"])
            batch = load_batch(self._store, self._ledger.run_id, command["step"])
            self._share.train(command["step"], batch, self._signs, Steering(**command["steering"]))
        elif what == "publish":
            part = self._share.write_part(command["version"])
            return {"part": None if part is None else part.model_dump_json()}
        elif what == "digests":
            return {"digests": self._share.digests()}
        elif what == "adopt":
            self._share.adopt(command["version"])
        elif what == "checkpoint":
            shard = self._share.write_shard(command["step"])
            return shard.to_message()
        elif what == "restore":
            self._share.restore(command["step"])
        else:
            raise SprawlError(f"unknown command {what!r}: the processes of a trainer must be of one release")
        return {}


def serve() -> int:
    """Until rank 0 says stop. Returns the exit code; errors are rank 0's to report."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    follower = follow()
    server: StageServer | None = None
    try:
        while (command := follower.next())["do"] != "stop":
            if command["do"] == "open":
                server = StageServer(command)
                follower.answer({})
            elif server is not None:
                follower.answer(server.handle(command))
    except SprawlError as error:
        follower.fail(str(error))
        follower.wait_for_end()
        return 2
    except RuntimeError as error:
        # A collective that broke because another process is gone: rank 0 finds out which, and ends this one too.
        traceback.print_exc()
        follower.wait_for_end()
        follower.fail(str(error).strip().splitlines()[0])
        return 1
    follower.bye()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(serve())
