"""Real runs whose trainer is a process a stage: to the end, killed at every point of a step, and resumed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from sprawl.anchor.service import read_sign_map
from sprawl.board.ledger import Ledger
from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.board.verify import verify_board
from sprawl.train.checkpoint import read_blob
from tests.integration.stage_victim import POINTS

ROOT = Path(__file__).parents[2]
STEPS, STAGES = 8, 3
SETTINGS = [
    f"steps={STEPS}",
    f"policy.stages={STAGES}",
    "policy.runtime=multi",
    "anchor.every=4",
    "anchor.lag=4",
    "checkpoint.every=2",
    "publish.keyframe_every=5",
    "evaluate.every=8",
    "evaluate.problems=10",
    "rollout.islands=1",
    "rollout.prompts=4",
    "rollout.samples=4",
    "rollout.max_new_tokens=5",
    "grpo.microbatch_rows=4",
    "boundary.codec=quantized-prf",
    # The drift controller, so touchy that it acts within these few steps: rank 0 decides, all ranks do it.
    "control.enabled=true",
    "control.speed=1e-9",
    "control.bring_forward=false",
    "probe.every=2",
]
END_WITHIN_S = 60.0


def command(board: Path, run_id: str, resume: bool, settings: tuple[str, ...] = ()) -> list[str]:
    base = [sys.executable, "-m", "sprawl.cli", "run", "configs/tiny.yaml", "--runner", "plain", "--board", str(board)]
    if resume:
        return [*base, "--resume", run_id]
    return [*base, "--run-id", run_id, *(part for setting in (*SETTINGS, *settings) for part in ("--set", setting))]


def root_digests(board: Path, run_id: str) -> list[str]:
    reader = VersionReader(open_store(str(board)), run_id)
    manifests = [reader.manifest(version) for version in range(STEPS + 1)]
    return [manifest.root_digest for manifest in manifests if manifest is not None]


@dataclass
class Ranks:
    """The processes that torchrun would start: rank 0 is `sprawl run`, the others serve; one of them is a victim."""

    run: list[str]
    victim: tuple[int, str, int] | None
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        for rank in range(STAGES):
            argv = [sys.executable, "-m", "tests.integration.stage_victim"] if rank else self.run
            if self.victim is not None and rank == self.victim[0]:
                argv = [*argv, self.victim[1], str(self.victim[2])]
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(STAGES),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            self.processes.append(
                subprocess.Popen(
                    argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )

    def finish(self, first: int, limit_s: float) -> list[str]:
        """Wait for rank `first`, then for the others; returns what each said."""
        try:
            self.processes[first].wait(limit_s)
            ended = time.monotonic()
            said = [process.communicate(timeout=END_WITHIN_S)[0] for process in self.processes]
            assert time.monotonic() - ended < END_WITHIN_S
            return said
        finally:
            for process in self.processes:
                if process.poll() is None:
                    for member in [*psutil.Process(process.pid).children(recursive=True), process]:
                        member.kill()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run, whose processes rank 0 starts itself."""
    board = tmp_path_factory.mktemp("calm")
    subprocess.run(command(board, "calm", resume=False), cwd=ROOT, check=True, timeout=300)
    return board


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_of_many_processes_is_a_whole_run(calm: Path) -> None:
    store = open_store(str(calm))
    ledger = Ledger(store, "calm")
    assert [record.step for record in ledger.steps()] == list(range(1, STEPS + 1))
    assert [record.step for record in ledger.fires()] == [4, 8]
    assert verify_board(store, "calm").problems == []
    assert not [event.message for event in ledger.events() if event.kind == "violation"]
    manifest = VersionReader(store, "calm").manifest(3)
    assert manifest is not None
    assert manifest.writers == [f"stage-{stage}" for stage in range(STAGES)]
    record = ledger.checkpoint(STEPS)
    assert record is not None
    kinds = ("masters", "optimizer", "codec")
    assert sorted(record.blobs) == sorted(f"{kind}-{s}of{STAGES}" for kind in kinds for s in range(STAGES))
    assert {name: about.base for name, about in record.masters.items()} == {
        f"masters-{stage}of{STAGES}": STEPS - 4 for stage in range(STAGES)
    }  # every process a delta of its own
    masters = read_blob(store, ledger, STEPS, "masters")
    assert sum(tensor.numel() for tensor in masters.values()) == ledger.run().parameters
    assert read_sign_map(store, ledger, 4, {name: tuple(t.shape) for name, t in masters.items()}) is not None
    alone = ("policy.runtime=single",)
    subprocess.run(command(calm, "alone", resume=False, settings=alone), cwd=ROOT, check=True, timeout=300)
    assert root_digests(calm, "alone") == root_digests(calm, "calm")  # untied embeddings: the bits of one process
    decisions = [record.control for record in ledger.steps() if record.control is not None]
    assert [decision.lr_scale for decision in decisions][::7] == [1.0, 0.125], "the controller has acted"
    assert any(record.dense_step for record in ledger.steps())
    assert decisions == [record.control for record in Ledger(store, "alone").steps()]
    for step, other in zip(ledger.steps(), Ledger(store, "alone").steps(), strict=True):
        assert step.boundary.sent - step.boundary_padding == other.boundary.sent
        assert step.boundary.dense == other.boundary.dense
        share = 1 if step.dense_step else 0.06
        assert 0 < step.boundary.sent <= share * step.boundary.dense + step.boundary_padding


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stage_killed_at_every_point_takes_the_run_down_and_a_resume_goes_on_with_the_same_bits(
    calm: Path, tmp_path: Path
) -> None:
    """Two steps are between deaths, so that every kind of resume (with and without replay) comes up."""
    board = tmp_path / "board"
    store = open_store(str(board), create=True)
    for number, point in enumerate(POINTS):
        deadly, rank = (2, 3, 4, 5, 6)[number], 1 + number % 2
        ranks = Ranks(command(board, "hurt", resume=number > 0), (rank, point, deadly))
        ranks.start()
        said = ranks.finish(rank, 150)
        assert ranks.processes[rank].returncode == -signal.SIGKILL, said
        assert ranks.processes[0].returncode == 2, said
        lines = [line for text in said for line in text.splitlines() if "trainer process" in line]
        assert len(lines) == 1, said
        phase = point if point in ("publish", "checkpoint") else "train step"
        assert lines[0].startswith(f"sprawl: trainer process {rank} (stage {rank} of {STAGES}) is gone"), lines
        assert f"during {phase} {deadly}" in lines[0]
        committed = deadly if point == "checkpoint" else deadly - 1
        assert VersionReader(store, "hurt").head() == committed
        assert Ledger(store, "hurt").checkpoint(6) is None
    subprocess.run(command(board, "hurt", resume=True), cwd=ROOT, check=True, timeout=300)
    assert root_digests(board, "hurt") == root_digests(calm, "calm")
    ledger = Ledger(store, "hurt")
    assert [record.step for record in ledger.steps()] == list(range(1, STEPS + 1))
    assert not [event.message for event in ledger.events() if event.kind == "violation"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_when_the_driver_is_killed_the_others_end_with_one_message(tmp_path: Path) -> None:
    board = tmp_path / "board"
    ranks = Ranks(command(board, "lost", resume=False), None)
    ranks.start()
    wait_for_version(board / "lost", 2, ranks.processes[0])
    driver = psutil.Process(ranks.processes[0].pid)
    family = driver.children(recursive=True)
    driver.kill()
    said = ranks.finish(0, 30)
    assert all(process.returncode != 0 for process in ranks.processes)
    lines = [line for text in said for line in text.splitlines() if "trainer process" in line]
    assert lines == ["sprawl: trainer process 0, which drives the run, is gone: trainer process 1 ends, like all"]
    psutil.wait_procs(family, timeout=60)
    assert not [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_started_stage_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    """Rank 0 started it itself, so it knows how it ended; islands and anchor stop with the run."""
    board = tmp_path / "board"
    process = subprocess.Popen(
        command(board, "named", resume=False), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_version(board / "named", 2, process)
    family = psutil.Process(process.pid).children(recursive=True)
    stages = [member for member in family if "sprawl.run.stage_server" in member.cmdline()]
    assert len(stages) == STAGES - 1
    stages[-1].kill()
    began = time.monotonic()
    output = process.communicate(timeout=END_WITHIN_S)[0]
    assert time.monotonic() - began < END_WITHIN_S
    assert process.returncode == 2
    assert output.count("was killed by SIGKILL") == 1
    assert "--resume named" in output
    psutil.wait_procs(family, timeout=30)
    assert not [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]


def wait_for_version(run: Path, version: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 150
    while not (run / "manifests" / f"{version:08d}.json").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


SHORT = ("policy.stages=2", "anchor.enabled=false", "evaluate.every=100", "boundary.codec=prf")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_stage_is_lost_after_the_liveness_bound(tmp_path: Path) -> None:
    """Its connection stays open and it never answers: the collective alone would wait for half an hour."""
    board = tmp_path / "board"
    settings = (*SHORT, "steps=200", "policy.liveness_s=4")
    process = subprocess.Popen(
        command(board, "still", resume=False, settings=settings),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_version(board / "still", 1, process)
    family = psutil.Process(process.pid).children(recursive=True)
    (stage,) = [member for member in family if "sprawl.run.stage_server" in member.cmdline()]
    stage.suspend()
    stopped = time.monotonic()
    output, _ = process.communicate(timeout=END_WITHIN_S)
    assert time.monotonic() - stopped > 4
    assert process.returncode == 2, output
    lines = [line for line in output.splitlines() if line.startswith("sprawl: ")]
    assert len(lines) == 1, output
    assert lines[0].startswith("sprawl: trainer process 1 (stage 1 of 2) has not answered for 4 s"), lines
    assert "--resume still" in output
    psutil.wait_procs(family, timeout=30)
    assert not [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_refused_steps_in_a_row_stop_a_run_of_many_processes(tmp_path: Path) -> None:
    """A learning rate that makes the weights infinite. Rollouts may be old enough to come from weights that are not."""
    settings = (*SHORT, "optimizer.lr=1e36", "optimizer.max_bad_steps=2", "rollout.max_staleness=8")
    argv = command(tmp_path / "board", "wild", resume=False, settings=settings)
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=280)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 2, output
    assert "2 steps in a row had a gradient that is not finite" in output
    ledger = Ledger(open_store(str(tmp_path / "board")), "wild")
    refused = [record.step for record in ledger.steps() if not record.applied]
    last = ledger.steps()[-1].step
    assert refused == [last]  # the second one ended the run before it was published
    assert [event.step for event in ledger.events() if event.kind == "violation"] == [last + 1]
    masters = read_blob(open_store(str(tmp_path / "board")), ledger, 0, "masters")
    assert all(tensor.isfinite().all() for tensor in masters.values())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_starts_replicas_of_a_pipeline(tmp_path: Path) -> None:
    """Two pipelines of two stages share every step; another number of processes than the config's is refused."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "-m"]
    replicas = ("policy.stages=2", "policy.replicas=2", "steps=4", "anchor.enabled=false", "evaluate.every=4")
    argv = command(tmp_path / "board", "both", resume=False, settings=replicas)
    subprocess.run([*torchrun, *argv[2:]], cwd=ROOT, check=True, timeout=300)
    ledger = Ledger(open_store(str(tmp_path / "board")), "both")
    assert [record.step for record in ledger.steps()] == [1, 2, 3, 4]
    assert not [event.message for event in ledger.events() if event.kind == "violation"]
    record = ledger.checkpoint(4)
    assert record is not None
    assert all(name.endswith(("-0of2", "-1of2")) for name in record.blobs)
    wrong = command(tmp_path / "board", "wrong", resume=False, settings=("policy.stages=3",))
    refused = subprocess.run([*torchrun, *wrong[2:]], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0
    assert "sprawl: torchrun started 4 processes" in refused.stderr
    assert not (tmp_path / "board" / "wrong").exists()
