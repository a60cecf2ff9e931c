"""`stack.json`: which processes `sprawl up` started, and where."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.board_server import BoardServer
from infra.processes import ProcessId

FORMAT = 1


@dataclass(frozen=True)
class State:
    """The server and its port, and what else there is."""

    port: int
    server: ProcessId
    worker: ProcessId | None = None
    board: BoardServer | None = None

    @property
    def ui_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def api_url(self) -> str:
        return f"{self.ui_url}/api"

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "port": self.port,
            "api_url": self.api_url,
            "server": self.server.as_dict(),
            "worker": self.worker.as_dict() if self.worker else None,
            "board": self.board.as_dict() if self.board else None,
        }

    @classmethod
    def read(cls, path: Path) -> State | None:
        """None where there is no such file, or none that can be understood."""
        try:
            data = json.loads(path.read_text())
            server = ProcessId.from_dict(data["server"])
            if server is None:
                return None
            worker, board = ProcessId.from_dict(data.get("worker")), BoardServer.from_dict(data.get("board"))
            return cls(int(data["port"]), server, worker, board)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.as_dict(), indent=2))
        temporary.replace(path)
