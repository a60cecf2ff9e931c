"""kill -9 of flow, worker and server, each alone and together, at random times over a run that Prefect drives.

Nobody starts anything again by hand: the automation resumes crashed flow runs, and `sprawl up`, called every few
seconds as `sprawl up --keep` does, brings back what died and finds what the events missed. The run must end with the
bits of the undisturbed one. Six kills here; `make test-chaos` makes fifty, and takes the time that needs.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.leftovers import PATTERN, sweep
from infra.recovery import automations, install
from sprawl.board.verify import verify_board
from tests.chaos.stack_scene import LIMIT_S, PARTS, Scene, overrides, scene

KILLS = int(os.environ.get("SPRAWL_CHAOS_KILLS", "6"))
FULL = KILLS >= 50


STEPS = 40 if FULL else 12
CHANCE = random.Random(os.environ.get("SPRAWL_CHAOS_SEED", "1"))


def strikes(chance: random.Random) -> Iterator[tuple[str, ...]]:
    """Which parts are hit at once, without end: each alone and all together; where there is time, every combination
    as often as the others, in a random order."""
    if not FULL:
        yield from itertools.cycle([("flow",), ("worker",), ("server",), PARTS])
    combinations = [parts for size in (1, 2, 3) for parts in itertools.combinations(PARTS, size)]
    while True:
        yield from chance.sample(combinations, len(combinations))


# In the environment of everything that runs here, under names that really carry secrets.
SECRETS = {
    "SPRAWL_TOKEN": "planted-4d1f-island-token",
    "SPRAWL_MIRROR_TOKEN": "planted-9c20-mirror-token",
    "AWS_SECRET_ACCESS_KEY": "planted-77aa-object-store",
    "WANDB_API_KEY": "planted-e3b0-tracker",
    "HF_TOKEN": "planted-51d6-hub",
    "PREFECT_API_KEY": "planted-88e4-prefect",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0 if FULL else 3 * LIMIT_S)]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with pytest.MonkeyPatch.context() as patch:
        for name, secret in SECRETS.items():
            patch.setenv(name, secret)
        with (
            scene(tmp_path_factory.mktemp("stage")) as made,
            temporary_settings({PREFECT_API_URL: made.up().api_url}),
        ):
            yield made


@pytest.fixture(scope="module")
def calm(stage: Scene) -> str:
    """The undisturbed run, as the first thing a person does after `sprawl up`. Its run id."""
    done = stage.prefect(
        *("deployment", "run", "post-train/local", "--watch", "--param", "config=configs/tiny.yaml"),
        *("--param", "run_id=calm", "--param", f"overrides={json.dumps(overrides(STEPS))}"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return "calm"


def digests(stage: Scene, run_id: str) -> list[str]:
    from sprawl.board.reader import VersionReader

    reader = VersionReader(stage.ledger(run_id).store, run_id)
    found = [reader.manifest(version) for version in range(STEPS + 1)]
    return [manifest.root_digest for manifest in found if manifest is not None]


def start(run_id: str, **parameters: Any) -> UUID:
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("post-train/local").id
        wanted = {"run_id": run_id, "overrides": overrides(STEPS), **parameters}
        return client.create_flow_run_from_deployment(deployment, parameters=wanted).id


def states(run_id: str) -> list[tuple[str, str, int]]:
    """Name, state and attempt of the flow runs of a run, oldest first."""
    from flows.flow_runs import read_chain

    with get_client(sync_client=True) as client:
        return [(link.name, link.state, link.attempt) for link in read_chain(client, run_id)]


def check(stage: Scene, run_id: str) -> None:
    """No step lost, none applied twice, and the bits of the undisturbed run: weights, moments, rewards."""
    assert digests(stage, run_id) == digests(stage, "calm")
    quiet, hurt = stage.ledger("calm"), stage.ledger(run_id)
    assert hurt.checkpoint(STEPS).blobs == quiet.checkpoint(STEPS).blobs  # type: ignore[union-attr]
    assert [record.step for record in hurt.steps()] == list(range(1, STEPS + 1))
    epochs = [record.epoch for record in hurt.steps()]
    assert epochs == sorted(epochs)
    assert [record.reward for record in hurt.steps()] == [record.reward for record in quiet.steps()]
    assert [record.step for record in hurt.fires()] == list(range(4, STEPS + 1, 4))
    assert [record.version for record in hurt.evaluations()] == [0, STEPS]
    assert verify_board(hurt.store, run_id).problems == []
    assert [event.message for event in hurt.events() if event.kind == "violation"] == []


def run_under_strikes(stage: Scene, run_id: str, hits: Iterator[tuple[str, ...]]) -> int:
    """One run from its start to its end, under strikes at random steps until there were kills enough; how many."""
    start(run_id)
    at, count, late = 1, 0, 0
    while sum(stage.killed.values()) < KILLS and late < 4:
        stage.wait(lambda at=at: stage.head(run_id) >= at or stage.finished(run_id), f"step {at}")
        stage.wait(lambda: bool(stage.flows()) or stage.finished(run_id), "a flow run")
        if stage.finished(run_id):
            break
        time.sleep(CHANCE.uniform(0, 3))
        parts, count = next(hits), count + 1
        stage.say(f"strike {count} on {run_id} after step {stage.head(run_id)}")
        stage.kill(parts)
        if "flow" in parts and late == 0 and CHANCE.random() < 0.3:  # and once more, while it starts
            time.sleep(CHANCE.uniform(0, 5))
            stage.wait(lambda: bool(stage.flows()) or stage.finished(run_id), "a flow run that follows")
            time.sleep(CHANCE.uniform(0, 5))
            stage.kill(("flow",))
        time.sleep(CHANCE.uniform(0, 5))
        stage.up()
        # Flow runs train on while worker and server are struck. After the last step a run is struck while it evaluates
        # and finishes, but less often than automatic starts without a step make Sprawl give up.
        at = min(STEPS, stage.head(run_id) + CHANCE.randint(1, 4))
        late += at == STEPS
    stage.wait(lambda: stage.finished(run_id), "the end of the run")
    # Killed after the run's last word and before its own, a flow run is followed by one that finds nothing to do.
    stage.wait(lambda: not stage.flows() and states(run_id)[-1][1] == "Completed", "the last flow run to complete")
    return count


def test_kills_at_random_times_change_nothing(stage: Scene, calm: str) -> None:
    began = time.monotonic()
    hits, report = strikes(CHANCE), {"runs": 0, "strikes": 0, "flow_runs": 0, "epochs": 0}
    while sum(stage.killed.values()) < KILLS:
        run_id = f"hurt-{report['runs'] + 1}"
        report["strikes"] += run_under_strikes(stage, run_id, hits)
        check(stage, run_id)
        chain = states(run_id)
        assert {state for _, state, _ in chain[:-1]} <= {"Crashed", "Cancelled", "Completed"}
        report["runs"] += 1
        report["flow_runs"] += len(chain)
        report["epochs"] += stage.ledger(run_id).acquire_epoch() - 1
    report |= {
        "kills": sum(stage.killed.values()),
        "of": stage.killed,
        "steps": STEPS,
        "found_without_events": sum("nobody had gone on" in line or "no process" in line for line in stage.log),
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(report))
    Path(os.environ.get("SPRAWL_CHAOS_REPORT", stage.place / "chaos.json")).write_text(
        json.dumps({**report, "log": stage.log}, indent=2)
    )


@pytest.fixture
def unserved(stage: Scene) -> Iterator[Any]:
    """A deployment with the parameters of post-train whose work pool no worker serves, of a flow of its own: nothing of
    it is ever executed. Nothing of it is left either."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
    from prefect.utilities.callables import parameter_schema

    from flows.post_train import post_train

    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="nobody", type="process"))
        made = client.create_deployment(
            flow_id=client.create_flow_from_name("silent"),
            name="nobody",
            work_pool_name="nobody",
            parameter_openapi_schema=parameter_schema(post_train.fn).model_dump_for_openapi(),
            enforce_parameter_schema=True,
        )
        try:
            yield client.read_deployment(made)
        finally:
            of_it = DeploymentFilter(id=DeploymentFilterId(any_=[made]))
            for run in client.read_flow_runs(deployment_filter=of_it):
                client.delete_flow_run(run.id)
            client.delete_deployment(made)
            client.delete_work_pool("nobody")


def test_silence_is_taken_for_a_crash_and_a_crash_starts_the_run_again(stage: Scene, unserved: Any) -> None:
    """Both automations on the real server, beside the installed ones, with a flow run that nobody executes and ten
    seconds of patience."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
    from prefect.events import Event
    from prefect.states import Running

    wanted = [
        item.model_copy(update={"name": f"silent: {item.name}"})
        for item in automations([unserved.id], [unserved.flow_id], silence_s=10)
    ]
    with get_client(sync_client=True) as client:

        def runs() -> list[Any]:
            mine = DeploymentFilter(id=DeploymentFilterId(any_=[unserved.id]))
            found = client.read_flow_runs(deployment_filter=mine)
            return sorted(found, key=lambda run: run.parameters["attempt"])

        install(client, wanted)
        try:
            run = client.create_flow_run_from_deployment(
                unserved.id, parameters={"run_id": "silent", "attempt": 2, "board": "b"}, state=Running()
            )
            beat = Event(
                event="prefect.flow-run.heartbeat",
                resource={"prefect.resource.id": f"prefect.flow-run.{run.id}"},
                related=[
                    {"prefect.resource.id": f"prefect.flow.{run.flow_id}", "prefect.resource.role": "flow"},
                    {"prefect.resource.id": f"prefect.deployment.{unserved.id}", "prefect.resource.role": "deployment"},
                ],
            )
            sent: list[float] = []

            def crashed() -> bool:
                # A server that was just killed may not know its new automations yet: one more beat, one more silence.
                if not sent or time.monotonic() - sent[-1] > 30:
                    again = beat.model_copy(update={"id": uuid4(), "occurred": datetime.now(UTC)})
                    body = [again.model_dump(mode="json")]
                    httpx.post(f"{PREFECT_API_URL.value()}/events", json=body).raise_for_status()
                    sent.append(time.monotonic())
                return client.read_flow_run(run.id).state_name == "Crashed"

            stage.wait(crashed, "silence", tending=False)
            assert "No heartbeat for 10 seconds" in (client.read_flow_run(run.id).state.message or "")  # type: ignore
            stage.wait(lambda: len(runs()) > 1, "the next flow run", tending=False)
        finally:
            for automation in wanted:
                for installed in client.read_automations_by_name(automation.name):
                    client.delete_automation(installed.id)
        _, following = runs()
        assert following.parameters["run_id"] == "silent"
        assert following.parameters["board"] == "b"
        assert following.parameters["attempt"] == 3
        assert following.work_pool_name == "nobody"
        assert following.state_name in ("Scheduled", "Late")


@pytest.mark.skipif(not FULL, reason="two minutes of silence: part of `make test-chaos`")
def test_a_flow_run_that_was_stopped_is_replaced_and_then_writes_nothing(stage: Scene, calm: str) -> None:
    """SIGSTOP of the flow: the heartbeats end, a successor takes over; SIGCONT: the old one is fenced off."""
    flow_run = start("stopped")
    stage.wait(lambda: stage.head("stopped") >= 3, "three steps")
    zombie = stage.flows()[str(flow_run)].process()
    assert zombie is not None
    zombie.send_signal(signal.SIGSTOP)
    try:
        stage.wait(lambda: stage.finished("stopped"), "the successor")
    finally:
        zombie.send_signal(signal.SIGCONT)
    stage.wait(lambda: not stage.flows(), "the old flow run to end")
    check(stage, "stopped")
    (_, old, first), (_, new, second) = states("stopped")
    assert (first, second, new) == (0, 1, "Completed")
    assert old in ("Crashed", "Failed"), "what the server found, or what it says itself when it finds itself fenced off"


def test_no_secret_is_left_anywhere(stage: Scene, calm: str) -> None:
    """Parameters, artifacts, logs, board, pages and the server's database of the runs above."""
    database = stage.stack.home / "prefect" / "prefect.db"
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    assert {"artifact", "flow_run", "log", "events"} <= tables
    assert (stage.place / "reports" / calm / "index.html").is_file()
    assert (stage.stack.logs / "worker.log").read_text()
    pattern = re.compile("|".join(re.escape(secret) for secret in SECRETS.values()).encode())
    searched = 0
    for path in stage.place.rglob("*"):
        if path.is_file() and ROOT_LINKS.isdisjoint(path.relative_to(stage.place).parts[:1]):
            searched += 1
            assert not pattern.search(path.read_bytes()), path
    assert searched > 50
    # What the killed workers had left of their flow runs' environments.
    stage.wait(lambda: not stage.flows(), "the last flow run to end")
    sweep(stage.stack.home / "prefect", (), older_than_s=0.0)
    for path in Path(tempfile.gettempdir()).glob(f"{PATTERN}/*"):
        assert not pattern.search(path.read_bytes()), path


ROOT_LINKS = {"configs", "models"}
