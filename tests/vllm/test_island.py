"""`sprawl island --engine vllm` as a process: found by heartbeat, follows the board, ends with its vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from sprawl.board.commit import CommitOptions
from sprawl.board.ledger import Ledger
from sprawl.board.publisher import Publisher
from sprawl.board.records import RunRecord
from sprawl.board.store import open_store
from sprawl.delta.files import WEIGHTS
from tests.rollout.support import EOS, RUN, character_tokenizer
from tests.vllm.bench import ENVIRONMENT, config, moved, random_state

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0


class Published:
    """A run on a local board that names vLLM as its engine."""

    def __init__(self, path: Path) -> None:
        self.board = str(path)
        store = open_store(self.board, create=True)
        self.ledger = Ledger(store, RUN)
        rollout = {"engine": "vllm", "follow": "eager", "compute_dtype": "bfloat16"}
        self.ledger.create_run(
            RunRecord(
                run_id=RUN,
                created_at=time.time(),
                config={"rollout": rollout, "threads": {"island": 1}},
                base_digest="",
                parameters=0,
                sprawl_version="0",
            )
        )
        settings = config(tied=True) | {"eos_token_id": EOS}
        files = {
            "config.json": json.dumps(settings).encode(),
            "tokenizer.json": character_tokenizer()._fast.to_str().encode(),
        }
        self._publisher = Publisher(store, RUN, CommitOptions(keyframe_every=100, dtype="bfloat16", files=files))
        self._state = random_state(settings)
        self._next = 0

    def publish(self) -> None:
        self._publisher.publish(self._next, self._next, self._state)
        self._next += 1
        self._state = moved(self._state, self._next)

    def url(self, process: subprocess.Popen[bytes], version: int, log: Path) -> str:
        """Where the island that has applied `version` is."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()[-3000:]
            for record in self.ledger.islands():
                if (record.pid, record.state, record.applied) == (process.pid, "ready", version):
                    return record.url
            time.sleep(0.1)
        raise AssertionError(log.read_text()[-3000:])


def start(run: Published, work: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sprawl.cli", "island", "--board", run.board, "--run-id", RUN]
    command += ["--island-id", "east", "--cache", str(work), "--engine-args", "--enforce-eager --max-num-seqs 8"]
    with log.open("ab") as out:
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=os.environ | ENVIRONMENT)


def assert_gone(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=30)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow
def test_an_island_on_vllm(tmp_path: Path) -> None:
    run, log, work = Published(tmp_path / "runs"), tmp_path / "log", tmp_path / "work"
    run.publish()
    body = {"text": "1+1=", "sampling_params": {"n": 2, "max_new_tokens": 6, "seeds": [1, 2]}}
    first = start(run, work, log)
    try:
        url = run.url(first, 0, log)
        run.publish()
        with httpx.Client(base_url=run.url(first, 1, log), timeout=LIMIT_S) as client:
            answer = client.post("/generate", json=body | {"weight_version": {"exact_version": 1}}).json()
            assert answer["weight_version_start"] == answer["weight_version_end"] == 1
            info = client.get("/server_info").json()
            assert (info["engine"]["kind"], info["versions_verified"]) == ("vllm", 2)
            assert info["engine"]["last_commit"]["version"] == 1
            for route in ("/pause", "/update_weights", "/collective_rpc", "/inference/v1/generate"):
                assert client.post(route, json={}).status_code in (403, 404)
            completion = {"prompt": "1+1=", "max_tokens": 4, "temperature": 0, "model": RUN}
            said = client.post("/v1/completions", json=completion).json()["choices"][0]["text"]
            with client.stream("POST", "/v1/completions", json=completion | {"stream": True}) as stream:
                events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == said
        assert url.startswith("http://127.0.0.1:")
        family = psutil.Process(first.pid).children(recursive=True)
        assert len(family) >= 3
        first.kill()  # without a chance to clean up
        first.wait()
        assert_gone(family)
    finally:
        first.kill()

    run.publish()
    inode = (work / "east" / "checkpoint" / WEIGHTS).stat().st_ino
    second = start(run, work, log)
    try:
        with httpx.Client(base_url=run.url(second, 2, log), timeout=LIMIT_S) as client:
            answer = client.post("/generate", json=body).json()
            assert answer["weight_version_end"] == 2
        family = psutil.Process(second.pid).children(recursive=True)
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0
        assert_gone(family)
    finally:
        second.kill()
    assert (work / "east" / "checkpoint" / WEIGHTS).stat().st_ino == inode  # patched, not fetched again
    assert run.ledger.islands() == []
