"""A SkyPilot API server with a home of its own, which knows one infrastructure: the session's Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from infra import ports
from infra.processes import spawn, tail
from tests.conftest import PATIENCE
from tests.sky.session.slurm import Slurm

FIRST_PORT = 18600
START_S = 120.0 * PATIENCE
SHIM = Path(__file__).parent / "shim"


@dataclass
class SkyServer:
    """`home` takes the place of the user's home directory, so that no real cluster or key is ever seen."""

    home: Path
    slurm: Slurm
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.home / "api-server.log"

    def environment(self) -> dict[str, str]:
        """For clients: everything that asks this server and nobody else."""
        return os.environ | {
            "HOME": str(self.home),
            "SKYPILOT_API_SERVER_ENDPOINT": self.url,
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(self.port),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYPILOT_USER": "sprawl",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def start(self) -> None:
        """Raises RuntimeError, with the end of its log, when it does not answer in time."""
        self.port = ports.next_free(FIRST_PORT)
        (self.home / ".sky").mkdir(parents=True, exist_ok=True)
        (self.home / ".slurm").mkdir(exist_ok=True)
        (self.home / ".slurm" / "config").write_text(self.slurm.ssh_config)
        (self.home / ".sky" / "config.yaml").write_text(
            textwrap.dedent("""\
                allowed_clouds: [slurm]
                jobs:
                  controller:
                    consolidation_mode: true
                """)
        )
        environment = {
            name: value for name, value in self.environment().items() if name != "SKYPILOT_API_SERVER_ENDPOINT"
        }
        environment |= {
            "IS_SKYPILOT_SERVER": "true",
            "SPRAWL_TEST_SKY_HEALTH": f"{self.url}/api/health",
            "PYTHONPATH": f"{SHIM}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
        }
        # In a PID namespace of its own: its job controllers leave its process tree, and end with it all the same.
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += [sys.executable, "-u", "-m", "sky.server.server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--metrics-port", str(ports.next_free(self.port + 1))]
        self._process = spawn(command, log=self.log, env=environment, cwd=self.home)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the SkyPilot API server did not start\n{tail(self.log, 40)}")
            time.sleep(0.5)

    def stop(self) -> None:
        """End it with its executors and job controllers."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/api/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False
