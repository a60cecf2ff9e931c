"""Kill a victim at every point of a scene, one process a point."""

import os
import signal
from collections.abc import Callable, Iterator

from tests.chaos import scenes
from tests.forking import context

LIMIT = 400  # points of a scene; more means that it does not end


def run(function: Callable[..., None], *arguments: object) -> int | None:
    """Exit code of a process that runs `function`; -SIGKILL when it was killed."""
    store = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    process = context().Process(target=_start, args=(store, function, *arguments), daemon=True)
    process.start()
    try:
        process.join(60)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
    return process.exitcode


def _start(environment: dict[str, str], function: Callable[..., None], *arguments: object) -> None:
    """The fork server may be older than the object store that this process is to use."""
    os.environ.update(environment)
    function(*arguments)


def each_point(scene: str, version: int, place: Callable[[int], tuple[str, str]]) -> Iterator[int]:
    """Yields after every kill; `place(n)` prepares and names the board and the folder of the n-th one.

    Ends when a victim survives the whole scene. Raises AssertionError when one fails by itself.
    """
    for point in range(LIMIT):
        board, folder = place(point)
        code = run(scenes.victim, scene, board, folder, version, point)
        if code == 0:
            return
        assert code == -signal.SIGKILL, f"{scene} failed by itself at point {point}: exit code {code}"
        yield point
    raise AssertionError(f"{scene} has more than {LIMIT} points")
