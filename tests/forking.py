"""One fork server for all tests that start many processes: it imports what victims need once, compiled kernels
included, so that they start in milliseconds. Python has one a process, and its first start decides the preload."""

import multiprocessing
from multiprocessing.context import ForkServerContext

_PRELOAD = [
    "tests.anchor.killed",
    "tests.train.runtime.worker",
    "tests.board.publish_loop",
    "tests.chaos.scenes",
    "tests.chaos.points",
    "s3fs",
]


def context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOAD)
    return found
