"""One vLLM server process: started on a checkpoint directory, reachable by nobody but this process, killed whole."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sprawl.errors import SprawlError
from sprawl.rollout.engine import EngineError
from sprawl.rollout.vllm import BACKEND, launch
from sprawl.rollout.vllm.api import Api


@dataclass(frozen=True)
class ServerOptions:
    """How to run vLLM. `arguments` are more of its own command line."""

    dtype: str = "bfloat16"
    threads: int | None = None  # OpenMP threads, on CPU; None: as vLLM decides
    arguments: tuple[str, ...] = ()
    start_timeout_s: float = 900.0
    environment: Mapping[str, str] = field(default_factory=dict)


class Server:
    """A running server process group. It listens on a Unix socket in a directory of mode 0700, because vLLM's
    development routes (pause, update_weights, ...) know no key: who could open a port could change the weights."""

    def __init__(self, process: subprocess.Popen[bytes], api: Api, socket_dir: str, log: Path) -> None:
        self.api = api
        self.started_at = time.monotonic()
        self._process = process
        self._socket_dir = socket_dir
        self._log = log

    @classmethod
    async def start(cls, checkpoint: Path, options: ServerOptions, log: Path) -> Server:
        """Returns once it answers. Raises EngineError with the end of its log when it ends or takes too long,
        SprawlError when vLLM is not installed. A start that is cancelled leaves nothing behind."""
        require_vllm()
        socket_dir = tempfile.mkdtemp(prefix="sprawl-vllm-")
        key = secrets.token_urlsafe(32)
        path = f"{socket_dir}/api"
        command = (sys.executable, launch.__file__, *command_line(checkpoint, path, options))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | environment(options, key),
            )
        server = cls(process, Api(path, key), socket_dir, log)
        try:
            await server._until_ready(options.start_timeout_s)
        except BaseException:
            await server.kill()
            raise
        return server

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        """Leader of the process group."""
        return self._process.pid

    async def kill(self) -> None:
        """SIGKILL to the whole group: a server that hangs answers nothing else, and none has anything to save."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self.api.close()
        shutil.rmtree(self._socket_dir, ignore_errors=True)

    def last_words(self) -> str:
        """The end of its log, for an error message."""
        try:
            lines = self._log.read_bytes()[-20000:].decode(errors="replace").splitlines()
        except OSError:
            return "no log"
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["no output"])[-1].strip()[:400]

    async def _until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not await self.api.healthy(timeout_s=5.0):
            if self.exit_code is not None:
                raise EngineError(f"vLLM ended with {self.exit_code} at its start: {self.last_words()} ({self._log})")
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM did not answer within {timeout_s:.0f} s: {self.last_words()} ({self._log})")
            await asyncio.sleep(0.2)


def require_vllm() -> None:
    """Raises SprawlError when vLLM is not installed in this environment."""
    if importlib.util.find_spec("vllm") is None:
        raise SprawlError(
            "the vllm engine needs vLLM in this environment",
            "pip install 'sprawl-rl[vllm]'; on a machine without a GPU see `make test-vllm`",
        )


def command_line(checkpoint: Path, socket_path: str, options: ServerOptions) -> list[str]:
    """vLLM's command line. Tokens go in and out, so it loads no tokenizer."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(checkpoint), "--served-model-name", "sprawl", "--uds", socket_path),
        *("--dtype", options.dtype, "--skip-tokenizer-init", "--generation-config", "vllm"),
        *("--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--disable-uvicorn-access-log"),
        *("--worker-extension-cls", "sprawl.rollout.vllm.transfer.Extension"),
        *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
        *options.arguments,
    ]


def environment(options: ServerOptions, key: str) -> dict[str, str]:
    """What it needs besides the environment of this process."""
    values = {
        "VLLM_API_KEY": key,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and update
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # On CPU vLLM would take nearly all memory for its KV cache.
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2"),
        "PYTHONPATH": os.pathsep.join([_import_root(), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if options.threads is not None:
        values["OMP_NUM_THREADS"] = str(options.threads)
    return values | dict(options.environment)


def parse_arguments(text: str) -> tuple[str, ...]:
    """More of vLLM's command line, as a shell would split it. Raises SprawlError for what is this engine's own."""
    try:
        arguments: Sequence[str] = shlex.split(text)
    except ValueError as error:
        raise SprawlError(f"--engine-args: {error}") from None
    own = {word for word in command_line(Path("x"), "x", ServerOptions()) if word.startswith("--")} | {
        "--host",
        "--port",
    }
    taken = [word for word in arguments if word.split("=")[0] in own]
    if taken:
        raise SprawlError(f"--engine-args: {taken[0]} is set by the island", "leave it out")
    return tuple(arguments)


def _import_root() -> str:
    """Where the server's worker finds this package, wherever it was started."""
    import sprawl

    assert sprawl.__file__ is not None
    return str(Path(sprawl.__file__).parents[1])
