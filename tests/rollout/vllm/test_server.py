"""The server process: who outlives whom, and what its command line may hold."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sprawl.errors import SprawlError
from sprawl.rollout.engine import EngineError, EngineLimits
from sprawl.rollout.vllm import launch, server
from sprawl.rollout.vllm.engine import VllmEngine
from sprawl.rollout.vllm.server import Server, ServerOptions, command_line, environment, parse_arguments


def gone(pid: int, limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


GRANDCHILD = "import subprocess,sys,time;p=subprocess.Popen([sys.executable,'-c','import time;time.sleep(60)'])"


def test_nothing_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    """The starter is killed without a chance to clean up; the command and what the command started end too."""
    pids = tmp_path / "pids"
    child = f"{GRANDCHILD};open({str(pids)!r},'w').write(f'{{p.pid}}');time.sleep(60)"
    argv = [sys.executable, launch.__file__, sys.executable, "-c", child]
    starter = (
        f"import subprocess,time;p=subprocess.Popen({argv!r},stdin=subprocess.PIPE,start_new_session=True);"
        "print(p.pid,flush=True);time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        leader = int(process.stdout.readline())
        deadline = time.monotonic() + 10
        while not pids.exists() or not pids.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        grandchild = int(pids.read_text())
        os.kill(process.pid, signal.SIGKILL)
    assert gone(leader)
    assert gone(grandchild)


@pytest.mark.parametrize(
    ("code", "expected"), [("import sys;sys.exit(7)", 7), ("import os;os.kill(os.getpid(),9)", 137)]
)
def test_the_exit_code_is_passed_on(code: str, expected: int) -> None:
    argv = [sys.executable, launch.__file__, sys.executable, "-c", code]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.wait(10) == expected


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends at once: the error is its last one, and nothing is left behind."""
    monkeypatch.setattr(server, "require_vllm", lambda: None)
    words = "print('loading');print('ValueError: no such model');raise SystemExit(3)"
    monkeypatch.setattr(server, "command_line", lambda *_: [sys.executable, "-c", words])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(EngineError, match="ended with 3 at its start: ValueError: no such model"):
        asyncio.run(Server.start(tmp_path, ServerOptions(), tmp_path / "log"))
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_start_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "require_vllm", lambda: None)
    monkeypatch.setattr(server, "command_line", lambda *_: [sys.executable, "-c", "import time;time.sleep(60)"])
    with pytest.raises(EngineError, match="did not answer within 0 s"):
        asyncio.run(Server.start(tmp_path, ServerOptions(start_timeout_s=0.3), tmp_path / "log"))


def test_the_run_decides_what_the_island_sets() -> None:
    assert parse_arguments("--max-num-seqs 4 --tensor-parallel-size=2") == (
        "--max-num-seqs",
        "4",
        "--tensor-parallel-size=2",
    )
    for words in ("--model x", "--uds=/tmp/x", "--port 80", "--host 0.0.0.0", "--dtype half", "'"):
        with pytest.raises(SprawlError, match="--engine-args"):
            parse_arguments(words)


def test_nobody_else_reaches_the_server() -> None:
    words = command_line(Path("/model"), "/private/api", ServerOptions())
    assert words[words.index("--uds") + 1] == "/private/api"
    assert not {"--host", "--port"} & set(words)
    secret = environment(ServerOptions(), "secret")
    assert secret["VLLM_API_KEY"] == "secret"
    assert "secret" not in words


def test_before_the_first_weights(tmp_path: Path) -> None:
    engine = VllmEngine(tmp_path, EngineLimits(10, 20, 30), log_file=tmp_path / "log")
    assert engine.trouble() is None
    assert engine.info()["kind"] == "vllm"
    asyncio.run(engine.close())
