"""What a worker leaves behind when it is killed: the environment of its flow runs, among the temporary files.

Prefect's process worker writes the whole environment of a flow run, secrets and all, into a file that only its owner
can read, and deletes it when the flow run ends. After a kill -9 of the worker nobody does.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Container
from pathlib import Path

PATTERN = "prefect-workspace-attempt-*"


def sweep(prefect_home: Path, alive: Container[str], older_than_s: float = 60.0, place: Path | None = None) -> int:
    """Delete those of this Prefect home whose flow run is not `alive`; how many. Others' files are not touched.

    `older_than_s` spares a flow run that is about to start and has no process yet. `place`: where temporary files are.
    """
    swept = 0
    for folder in (place or Path(tempfile.gettempdir())).glob(PATTERN):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            flow_run = str(json.loads((folder / "supervisor.json").read_text())["flow_run_id"])
            environment = json.loads((folder / "workspace.json").read_text())["environment"]
            mine = environment.get("PREFECT_HOME") == str(prefect_home)
            if mine and flow_run not in alive and time.time() - folder.stat().st_mtime > older_than_s:
                shutil.rmtree(folder)
                swept += 1
    return swept
