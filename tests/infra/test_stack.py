"""The local stack: the real one once, and everything that can go wrong around it without a server."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from click.testing import CliRunner

from infra import ports, stack
from infra.commands import status as status_command
from infra.deployments import DEPLOYMENTS, QUEUES, SKY_DEPLOYMENTS, Deployment, flow_of
from infra.processes import ProcessId, spawn
from infra.recovery import RESUME, ZOMBIE
from infra.stack import Stack, StackInfo
from infra.stack_state import State
from infra.watch import ALERTS
from sprawl.errors import SprawlError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_below(directory: Path) -> list[psutil.Process]:
    """Processes that were told to keep their Prefect home there."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREFECT_HOME", "").startswith(str(directory)):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


# -- ports


def test_an_explicit_port_that_is_taken_is_refused_with_its_holder(tmp_path: Path, taken: int) -> None:
    with pytest.raises(SprawlError, match=rf"port {taken} is taken by .*pid {os.getpid()}.*--port \d+"):
        Stack(tmp_path / ".sprawl").up(taken)
    assert not (tmp_path / ".sprawl" / "stack.json").exists()


def test_a_taken_default_port_gives_way_to_the_next_free_one(
    tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "DEFAULT_PORT", taken)
    chosen, (note,) = Stack(tmp_path)._choose_port(None, None)
    assert chosen > taken
    assert f"port {taken} is taken" in note
    assert ports.is_free(chosen)


@pytest.mark.parametrize("port", [0, 70000])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(SprawlError, match="not a TCP port"):
        ports.is_free(port)


# -- failures


def test_a_server_that_dies_leaves_its_last_words_and_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(argv, *, log, env, cwd):
        code = "import sys, time; print('disk full', flush=True); time.sleep(0.3); sys.exit(3)"
        return spawn([sys.executable, "-c", code], log=log, env=env)

    monkeypatch.setattr(stack, "spawn", dying)
    home = tmp_path / ".sprawl"
    with pytest.raises(SprawlError, match=r"ended with code 3(?s:.*)disk full"):
        Stack(home).up(free_port(), wait_s=20)
    assert not (home / "stack.json").exists()
    assert Stack(home).status().server == "down"


def test_an_interrupted_start_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hanging(argv, *, log, env, cwd):
        return spawn([sys.executable, "-c", "import time; time.sleep(60)"], log=log, env=env)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(stack, "spawn", hanging)
    monkeypatch.setattr(Stack, "_wait", interrupt)
    home = tmp_path / ".sprawl"
    with pytest.raises(KeyboardInterrupt):
        Stack(home).up(free_port())
    assert not (home / "stack.json").exists()
    assert processes_below(home) == []


def test_the_worker_of_a_server_that_died_goes_on_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the port that it knows, and alive: flow runs are its children, and training is not the server's to end."""
    home, port = tmp_path / ".sprawl", free_port()
    home.mkdir()
    worker = spawn([sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "log", env=os.environ)
    identity = ProcessId.of(worker.pid)
    assert identity is not None
    state = {"port": port, "server": {"pid": 1, "started": 0.0}, "worker": identity.as_dict()}
    (home / "stack.json").write_text(json.dumps(state))
    asked = []

    def start(self: Stack, at: int, wait_s: float, before: State | None) -> State:
        asked.append(at)
        assert before is not None
        return before

    monkeypatch.setattr(Stack, "_start", start)
    monkeypatch.setattr(Stack, "_register", lambda self, state: ())
    monkeypatch.setattr(Stack, "_heal", lambda self: ())
    try:
        assert Stack(home).up().started
        assert asked == [port]
        assert identity.alive
        assert ProcessId.from_dict(json.loads((home / "stack.json").read_text())["worker"]) == identity
        monkeypatch.setattr(Stack, "_flows", lambda self: {"a": identity})
        with pytest.raises(SprawlError, match="already up"):
            Stack(home).up(free_port())
    finally:
        worker.kill()
        worker.wait(20)


def test_a_stack_of_which_nothing_lives_comes_back_where_it_was_unless_the_port_is_gone(
    tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "DEFAULT_PORT", taken)
    dead, port = ProcessId(1, 0.0), free_port()
    assert Stack(tmp_path)._choose_port(None, State(port, dead, dead)) == (port, ())
    chosen, notes = Stack(tmp_path)._choose_port(None, State(taken, dead, dead))
    assert chosen != taken
    assert len(notes) == 1


def test_a_port_that_a_stranger_took_is_not_given_to_the_server_that_comes_back(tmp_path: Path, taken: int) -> None:
    """The living worker knows the old port: another one would leave it alone."""
    home = tmp_path / ".sprawl"
    home.mkdir()
    me = ProcessId.of(os.getpid())
    assert me is not None
    state = {"port": taken, "server": {"pid": 1, "started": 0.0}, "worker": me.as_dict()}
    (home / "stack.json").write_text(json.dumps(state))
    with pytest.raises(SprawlError, match=f"port {taken} is taken"):
        Stack(home).up()


def test_down_leaves_a_foreign_process_on_the_port_alone(tmp_path: Path) -> None:
    """It took the port after our server had died: it is not in the state, so it is not ours."""
    home, port = tmp_path / ".sprawl", free_port()
    home.mkdir()
    listen = f"s = socket.socket(); s.bind(('127.0.0.1', {port})); s.listen()"
    code = f"import socket, time; {listen}; time.sleep(60)"
    stranger = spawn([sys.executable, "-c", code], log=tmp_path / "log", env=os.environ)
    try:
        deadline = time.monotonic() + 60
        while ports.is_free(port):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (home / "stack.json").write_text(json.dumps({"port": port, "server": {"pid": 1, "started": 0.0}}))
        assert Stack(home).status().server == "down"
        assert Stack(home).down() is False
        assert stranger.poll() is None
        assert not ports.is_free(port)
    finally:
        stranger.kill()
        stranger.wait()


def test_a_recycled_pid_in_the_state_is_neither_up_nor_ended(tmp_path: Path) -> None:
    home = tmp_path / ".sprawl"
    home.mkdir()
    ours = {"pid": os.getpid(), "started": 12345.0}
    (home / "stack.json").write_text(json.dumps({"port": free_port(), "server": ours, "worker": ours}))
    assert Stack(home).status().server == "down"
    assert Stack(home).down() is False  # and this test goes on
    assert not (home / "stack.json").exists()


def test_down_with_a_damaged_state_says_nothing_was_up(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text("{half")
    assert Stack(tmp_path).down() is False


def test_the_servers_environment_names_our_server_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql://elsewhere")
    environment = Stack(tmp_path).environment("http://127.0.0.1:4321/api")
    assert "PREFECT_API_KEY" not in environment
    assert "PREFECT_SERVER_DATABASE_CONNECTION_URL" not in environment
    assert environment["PREFECT_API_URL"] == "http://127.0.0.1:4321/api"
    assert environment["PREFECT_HOME"] == str(tmp_path / "prefect")


def test_status_command_fails_when_nothing_is_up(tmp_path: Path) -> None:
    result = CliRunner().invoke(status_command, ["--home", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["server"] == "down"


# -- deployments


@pytest.mark.parametrize(
    ("file", "deployments"), [("prefect.yaml", DEPLOYMENTS), ("prefect.sky.yaml", SKY_DEPLOYMENTS)]
)
def test_prefect_yaml_declares_the_same_deployments_as_the_stack(
    file: str, deployments: tuple[Deployment, ...]
) -> None:
    declared = yaml.safe_load((ROOT / file).read_text())["deployments"]
    assert [
        (
            item["entrypoint"],
            item["name"],
            item["description"],
            item["parameters"],
            item["tags"],
            item["work_pool"]["name"],
            item["work_pool"]["work_queue_name"],
            item["work_pool"].get("job_variables", {}),
            [(schedule["cron"], schedule["slug"], schedule["active"]) for schedule in item.get("schedules", [])],
        )
        for item in declared
    ] == [
        (
            item.entrypoint,
            item.name,
            item.description,
            dict(item.parameters),
            list(item.tags),
            item.pool,
            item.queue.name,
            dict(item.job_variables),
            [(schedule.cron, schedule.slug, False) for schedule in item.schedules],
        )
        for item in deployments
    ]


@pytest.mark.parametrize("deployment", [*DEPLOYMENTS, *SKY_DEPLOYMENTS], ids=lambda d: f"{d.entrypoint}/{d.name}")
def test_every_parameter_of_the_ui_form_has_a_type_and_says_what_it_is(deployment: Deployment) -> None:
    from prefect.utilities.callables import parameter_schema

    schema = parameter_schema(flow_of(deployment).fn).model_dump_for_openapi()
    assert schema["properties"]
    for name, field in schema["properties"].items():
        assert field.get("description"), name
        assert "type" in field or "anyOf" in field, name
    assert set(deployment.parameters) <= set(schema["properties"])


# -- the real one


@pytest.mark.slow
def test_up_serves_and_down_ends_it(tmp_path: Path) -> None:
    home = tmp_path / ".sprawl"
    local, port = Stack(home), free_port()
    try:
        info = local.up(port, wait_s=120)
        expected = StackInfo(f"http://127.0.0.1:{port}/api", f"http://127.0.0.1:{port}", info.pid, True, info.notes)
        assert info == expected
        found = httpx.post(f"{info.api_url}/deployments/filter", json={}, timeout=30).json()
        assert sorted(item["entrypoint"] for item in found) == sorted(d.entrypoint for d in DEPLOYMENTS)
        assert any("no work pool 'sky'" in note for note in info.notes)
        queues = httpx.post(f"{info.api_url}/work_pools/local/queues/filter", json={}, timeout=30).json()
        assert {item["name"]: item["concurrency_limit"] for item in queues if item["name"] != "default"} == {
            queue.name: queue.limit for queue in QUEUES
        }
        names = httpx.post(f"{info.api_url}/automations/filter", json={}, timeout=30).json()
        assert sorted(item["name"] for item in names) == sorted((RESUME, ZOMBIE, *(alert.name for alert in ALERTS)))
        assert {item["pull_steps"][0].popitem()[1]["directory"] for item in found} == {str(tmp_path)}
        page = httpx.get(info.ui_url, headers={"accept": "text/html"}, follow_redirects=True, timeout=30)
        assert page.status_code == 200
        assert "Prefect" in page.text

        again = local.up()
        assert (again.started, again.pid, again.api_url) == (False, info.pid, info.api_url)
        with pytest.raises(SprawlError, match=f"already up on port {port}"):
            local.up(ports.next_free(port + 1))

        state = json.loads((home / "stack.json").read_text())
        worker = ProcessId.from_dict(state["worker"])
        assert worker is not None
        assert worker.alive
        # A person switched the automation off, the schedule on: both stay so.
        (resume,) = (item for item in names if item["name"] == RESUME)
        httpx.patch(f"{info.api_url}/automations/{resume['id']}", json={"enabled": False}, timeout=30)
        evaluate = next(item for item in found if item["entrypoint"].endswith("evaluate"))
        hourly = f"{info.api_url}/deployments/{evaluate['id']}/schedules/{evaluate['schedules'][0]['id']}"
        assert evaluate["schedules"][0]["active"] is False
        httpx.patch(hourly, json={"active": True}, timeout=30).raise_for_status()
        # The pool for SkyPilot appears: its deployments follow at the next start.
        pool = {"name": "sky", "type": "skypilot", "base_job_template": {}}
        httpx.post(f"{info.api_url}/work_pools/", json=pool, timeout=30).raise_for_status()

        psutil.Process(worker.pid).kill()
        deadline = time.monotonic() + 10
        while worker.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        assert local.status().worker == "down"
        assert local.up().started is False  # brings the worker back
        found = httpx.post(f"{info.api_url}/deployments/filter", json={}, timeout=30).json()
        assert sorted((item["entrypoint"], item["work_pool_name"]) for item in found) == sorted(
            (d.entrypoint, d.pool) for d in (*DEPLOYMENTS, *SKY_DEPLOYMENTS)
        )
        local_evaluate = next(item for item in found if item["id"] == evaluate["id"])
        assert [item["active"] for item in local_evaluate["schedules"]] == [True]
        names = httpx.post(f"{info.api_url}/automations/filter", json={}, timeout=30).json()
        assert {item["name"] for item in names if not item["enabled"]} == {RESUME}
        assert len(names) == 2 + len(ALERTS)
        assert (local.status().server, local.status().worker) == ("up", "up")
    finally:
        local.down()
    assert processes_below(home) == []
    assert ports.is_free(port)
    assert local.status().server == "down"
    assert local.down() is False
