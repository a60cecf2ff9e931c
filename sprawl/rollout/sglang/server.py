"""One SGLang server process: on loopback, with a key that nobody else knows."""

from __future__ import annotations

import importlib.util
import secrets
import socket
import sys
import tempfile
from pathlib import Path
from typing import Self

from sprawl.errors import SprawlError
from sprawl.rollout.sglang.api import SglangApi
from sprawl.rollout.vllm.server import Server, ServerOptions, parse_own

STREAMS = {"--stream-output", "--incremental-streaming-output"}  # events that do not repeat what came before


class SglangServer(Server):
    """A running server process group. SGLang listens on a port; its key stands in a file that only this user can read,
    because everybody can read a command line."""

    product = "SGLang"

    @classmethod
    async def start_at(cls, checkpoint: Path, version: int, options: ServerOptions, log: Path) -> Self:
        """Returns once it answers, serving what is in `checkpoint` under the name of `version`. Raises EngineError with
        the end of its log when it ends or takes too long, SprawlError when SGLang is not installed."""
        require_sglang()
        directory = tempfile.mkdtemp(prefix="sprawl-sglang-")  # of mode 0700
        key, port = secrets.token_urlsafe(32), free_port()
        config = Path(directory) / "config.yaml"
        config.write_text(f"api-key: {key}\n")
        command = command_line(checkpoint, port, config, version, options)
        return await cls.launch(command, environment(options), SglangApi(port, key), directory, log, options)


def require_sglang() -> None:
    """Raises SprawlError when SGLang is not installed in this environment."""
    if importlib.util.find_spec("sglang") is None:
        raise SprawlError("the sglang engine needs SGLang in this environment", "pip install sglang")


def free_port() -> int:
    """A port of loopback that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def command_line(checkpoint: Path, port: int, config: Path, version: int, options: ServerOptions) -> list[str]:
    """SGLang's command line. Tokens go in and out, so it loads no tokenizer. Seeds count in deterministic inference
    only."""
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--config", str(config), "--model-path", str(checkpoint), "--served-model-name", "sprawl"),
        *("--host", "127.0.0.1", "--port", str(port), "--weight-version", str(version)),
        *("--dtype", options.dtype, "--skip-tokenizer-init", "--enable-deterministic-inference"),
        *options.arguments,
    ]


def environment(options: ServerOptions) -> dict[str, str]:
    """What it needs besides the environment of this process."""
    values = {
        # /health would generate a token, which a paused server does not.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs at the sampling temperature
        "HF_HUB_OFFLINE": "1",
    }
    if options.threads is not None:
        values["OMP_NUM_THREADS"] = str(options.threads)
    return values | dict(options.environment)


def parse_arguments(text: str) -> tuple[str, ...]:
    """More of SGLang's command line, as a shell would split it. Raises SprawlError for what is this engine's own."""
    own = {word for word in command_line(Path("x"), 0, Path("x"), 0, ServerOptions()) if word.startswith("--")}
    return parse_own(text, own | STREAMS | {"--api-key", "--admin-api-key"})
