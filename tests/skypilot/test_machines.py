"""What runs on SkyPilot's machines: torchrun from its variables, addresses, notices of preemption, exit codes."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infra.skypilot.address import advertised_url, is_public, public_sources
from infra.skypilot.island import TOLD_TO_LEAVE, Keeper, island_command, island_name
from infra.skypilot.metadata import AWS, GCP, NOWHERE, Metadata
from infra.skypilot.nodes import interface_of, probe_environment, processes_per_node, read_nodes, torchrun_argv
from infra.skypilot.trainer import run_command
from sprawl.board.ledger import Ledger
from sprawl.board.records import RunRecord
from sprawl.board.store import open_store
from sprawl.config import load_config
from sprawl.errors import SprawlError

TWO = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}


def test_nodes_become_torchrun() -> None:
    nodes = read_nodes(TWO)
    assert (nodes.head, nodes.ip) == ("10.0.0.1", "10.0.0.2")
    argv = torchrun_argv(nodes, 4, ["sprawl.cli", "run"])
    assert argv[1:] == [
        *("-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "4"),
        *("--master-addr", "10.0.0.1", "--master-port", "8476", "-m", "sprawl.cli", "run"),
    ]
    assert probe_environment(nodes)["WORLD_SIZE"] == "2"
    assert read_nodes({}).ips == ("127.0.0.1",)
    with pytest.raises(SprawlError, match="names 2 addresses for 3 nodes"):
        read_nodes({**TWO, "SKYPILOT_NUM_NODES": "3"})


def test_processes_have_to_fill_the_nodes() -> None:
    assert processes_per_node(8, read_nodes(TWO)) == 4
    with pytest.raises(SprawlError, match=r"1 trainer processes cannot be spread over 2 nodes \(policy.runtime=multi"):
        processes_per_node(1, read_nodes(TWO))


def test_loopback_has_an_interface_and_nowhere_has_none() -> None:
    assert interface_of("127.0.0.1") is not None
    assert interface_of("203.0.113.9") is None


def test_a_recovered_trainer_goes_on_with_its_run(tmp_path: Path) -> None:
    board = str(tmp_path / "board")
    environment = {
        **TWO,
        "SPRAWL_BOARD": board,
        "SPRAWL_CONFIG": "configs/tiny.yaml",
        "SPRAWL_RUN_ID": "r",
        "SPRAWL_SET": "policy.runtime=multi steps=3",
    }
    first = run_command(environment)
    place = ["--board", board, "--runner", "plain", "--fleet", "none"]
    started = ["sprawl.cli", "run", "configs/tiny.yaml", "--set", "policy.runtime=multi", "--set", "steps=3"]
    assert first[first.index("sprawl.cli") :] == [*started, "--run-id", "r", *place]
    assert first[first.index("--nproc-per-node") + 1] == "4"  # eight stages on two nodes
    config = load_config("configs/tiny.yaml", ["policy.runtime=multi", "policy.stages=2"])
    Ledger(open_store(board, create=True), "r").create_run(
        RunRecord(
            run_id="r",
            created_at=1.0,
            config=config.model_dump(mode="json"),
            base_digest="0",
            parameters=1,
            sprawl_version="0",
        )
    )
    again = run_command(environment)
    assert again[again.index("sprawl.cli") :] == [*started[:3], "--resume", "r", *place]
    assert again[again.index("--nproc-per-node") + 1] == "1"  # of the run's own two stages
    with pytest.raises(SprawlError, match="SPRAWL_BOARD is not set"):
        run_command({})


def test_an_address_is_what_others_reach() -> None:
    def known(port: int) -> tuple[str, int]:
        return "198.51.100.7", port + 1

    assert advertised_url("https://islands.example/1/", 8300, "10.0.0.1", []) == "https://islands.example/1"
    assert advertised_url("private", 8300, "10.0.0.1", [known]) == "http://10.0.0.1:8300"
    assert advertised_url("public", 8300, "10.0.0.1", [lambda port: None, known]) == "http://198.51.100.7:8301"
    with pytest.raises(SprawlError, match="does not know its public address"):
        advertised_url("public", 8300, "10.0.0.1", [lambda port: None])
    with pytest.raises(SprawlError, match="SPRAWL_ADVERTISE=nonsense"):
        advertised_url("nonsense", 8300, "10.0.0.1", [])
    assert is_public("8.8.8.8")
    assert not any(map(is_public, ("10.0.0.1", "127.0.0.1", "169.254.1.1", "fe80::1%eth0", "nonsense")))


def test_a_container_behind_a_port_map_says_the_port_outside() -> None:
    sources = public_sources(
        {"RUNPOD_PUBLIC_IP": "198.51.100.9", "RUNPOD_TCP_PORT_8300": "41234"}, Metadata(_cloud=NOWHERE)
    )
    assert advertised_url("public", 8300, "10.0.0.1", sources) == "http://198.51.100.9:41234"


class Cloud(BaseHTTPRequestHandler):
    """The metadata server of one cloud."""

    kind = AWS
    notice: str | None = None

    def do_PUT(self) -> None:
        self._answer("token" if self.kind == AWS else None)

    def do_GET(self) -> None:
        if self.kind == AWS:
            if self.headers.get("X-aws-ec2-metadata-token") != "token":
                return self._answer(None, 401)
            values = {
                "/latest/meta-data/public-ipv4": "198.51.100.3",
                "/latest/meta-data/spot/instance-action": self.notice,
            }
        else:
            if self.headers.get("Metadata-Flavor") != "Google":
                return self._answer(None, 403)
            root = "/computeMetadata/v1/instance"
            values = {
                f"{root}/id": "1",
                f"{root}/network-interfaces/0/access-configs/0/external-ip": "198.51.100.4",
                f"{root}/preempted": self.notice or "FALSE",
            }
        return self._answer(values.get(self.path))

    def _answer(self, text: str | None, status: int = 404) -> None:
        self.send_response(200 if text is not None else status)
        if self.kind == GCP:
            self.send_header("Metadata-Flavor", "Google")
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(params=[AWS, GCP])
def cloud(request: pytest.FixtureRequest) -> Iterator[tuple[type[Cloud], Metadata]]:
    handler = type("ThisCloud", (Cloud,), {"kind": request.param, "notice": None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, Metadata(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def test_the_cloud_tells_the_address_and_of_preemption(cloud: tuple[type[Cloud], Metadata]) -> None:
    handler, metadata = cloud
    assert metadata.cloud == handler.kind
    url = advertised_url("public", 8300, "10.0.0.1", public_sources({}, metadata))
    assert url == ("http://198.51.100.3:8300" if handler.kind == AWS else "http://198.51.100.4:8300")
    assert metadata.preempted() is None
    handler.notice = json.dumps({"action": "terminate", "time": "T"}) if handler.kind == AWS else "TRUE"
    assert metadata.preempted() == ("terminate at T" if handler.kind == AWS else "preempted")


def test_no_metadata_server_is_no_cloud() -> None:
    metadata = Metadata("http://127.0.0.1:9")
    assert metadata.cloud == NOWHERE
    assert metadata.preempted() is None


CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), sys.exit(0)))
print("up", flush=True)
time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3)])
def test_an_island_that_ends_by_itself_keeps_its_code(code: int, expected: int) -> None:
    assert Keeper([sys.executable, "-c", CHILD, "0", str(code)]).wait() == expected


def test_a_notice_lets_the_island_drain_and_the_job_be_recovered(
    cloud: tuple[type[Cloud], Metadata], capfd: pytest.CaptureFixture[str]
) -> None:
    handler, metadata = cloud
    keeper = Keeper([sys.executable, "-c", CHILD, "60", "0"])
    threading.Thread(target=keeper.watch, args=(metadata, 0.02), daemon=True).start()
    deadline = time.monotonic() + 60
    while "up" not in capfd.readouterr().out:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not keeper.told_to_leave
    handler.notice = "{}" if handler.kind == AWS else "TRUE"
    assert keeper.wait() == TOLD_TO_LEAVE
    out = capfd.readouterr().out
    assert "about to be taken" in out
    assert "drained" in out
    keeper.leave("again")  # the island is gone


def test_an_island_that_was_killed_is_an_error() -> None:
    keeper = Keeper([sys.executable, "-c", CHILD, "60", "0"])
    keeper._process.send_signal(signal.SIGKILL)
    assert keeper.wait() == 137


def test_the_island_is_called_with_the_address_of_others(tmp_path: Path) -> None:
    environment = {
        "SPRAWL_BOARD": "s3://b/r",
        "SPRAWL_RUN_ID": "run-1",
        "SPRAWL_ISLAND_ID": "island-3",
        "SPRAWL_ADVERTISE": "private",
        "SPRAWL_IDLE_EXIT_S": "600",
        "SKYPILOT_NODE_IPS": "10.0.0.5",
        "SPRAWL_ENGINE": "vllm",
        "SPRAWL_ENGINE_ARGS": "--max-num-seqs 8",
    }
    argv = island_command(environment, tmp_path, [])
    options = dict(itertools.pairwise(argv))
    assert options["--advertise-url"] == "http://10.0.0.5:8300"
    assert (options["--island-id"], options["--exit-when-idle"], options["--engine"]) == ("island-3", "600", "vllm")
    assert "--obey-fleet" in argv
    from sprawl.commands.serve import island

    island.make_context("island", argv[4:])  # the command line knows all of them


def test_islands_are_named_by_their_job_and_node() -> None:
    assert island_name({"SKYPILOT_MANAGED_JOB_ID": "7"}) == "job-7"
    assert island_name({**TWO, "SPRAWL_ISLAND_ID": "a"}) == "a-1"
    assert island_name({}) is None
