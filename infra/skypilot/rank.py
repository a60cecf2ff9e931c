"""One trainer process of a run that something other than `sprawl run` drives: the first one becomes the driver, all
others serve its trainer.

    python -m infra.skypilot.rank prefect flow-run execute        (by torchrun, or alone)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sprawl.run.launch import launched_rank


def main(driver: list[str]) -> int:
    if launched_rank():
        from sprawl.run.stage_server import serve

        return serve()
    # Commands of this interpreter's environment (prefect) come first: it need not be the one that is on the PATH.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    os.execvp(driver[0], driver)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
