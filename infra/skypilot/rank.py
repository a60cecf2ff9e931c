"""One trainer process of a run that something other than `sprawl run` drives: the first one becomes the driver, all
others serve its trainer.

    python -m infra.skypilot.rank prefect flow-run execute        (by torchrun, or alone)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sprawl.run.launch import launched_rank


def main(driver: list[str]) -> int:  # noqa: RET503
    if launched_rank():
        from sprawl.run.stage_server import serve

        return serve()
    # Commands of this interpreter's environment (prefect) and code of this checkout come first, whatever else is there.
    prepend("PATH", Path(sys.executable).parent, os.defpath)
    prepend("PYTHONPATH", Path.cwd(), "")
    os.execvp(driver[0], driver)


def prepend(variable: str, directory: Path, default: str) -> None:
    rest = os.environ.get(variable, default)
    os.environ[variable] = os.pathsep.join((str(directory), rest) if rest else (str(directory),))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
