"""The shipped YAMLs by SkyPilot's own loaders and optimizer, without a network or an account."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
YAMLS = sorted((ROOT / "sky").glob("*.yaml"))
SCRIPTS = sorted((ROOT / "sky" / "scripts").glob("*.sh"))
OWN = ROOT / ".venv-sky" / "bin" / "python"


@functools.cache
def interpreter() -> str | None:
    """One that has SkyPilot: this one, or that of .venv-sky. (`sky` alone is this checkout's folder.)"""
    for python in (sys.executable, str(OWN)):
        if Path(python).exists():
            found = subprocess.run([python, "-c", "import sky.jobs.constants"], cwd=ROOT, capture_output=True)
            if found.returncode == 0:
                return python
    return None


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests.skypilot.offline` prints."""
    python = interpreter()
    if python is None:
        pytest.skip("SkyPilot is not installed: `make .venv-sky/.installed` does it")
    home = tmp_path_factory.mktemp("sky")
    environment = os.environ | {"HOME": str(home), "SKY_RUNTIME_DIR": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "-m", "tests.skypilot.offline"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def test_every_yaml_loads_and_means_what_it_says(said: dict[str, Any]) -> None:
    trainer, island, anchor, serve = (said["schema"][name] for name in ("trainer", "rollout-worker", "anchor", "serve"))
    assert (trainer["nodes"], trainer["tiers"], trainer["spot"]) == (2, ["best"], [False])
    assert (island["spot"], island["ports"]) == ([True], ["8300"])
    assert island["recovery"] == {
        "strategy": "EAGER_NEXT_REGION",
        "max_restarts_on_errors": 3,
        "recover_on_exit_codes": [3, 143],
    }
    assert len(island["clouds"]) >= 3
    assert anchor["ports"] is None
    assert serve["service"] == {"path": "/health", "placer": "dynamic_fallback", "fallback": True}
    for task in said["schema"].values():
        assert "SPRAWL_TOKEN" in task["secrets"]
        assert task["in_envs"] == []


def test_the_job_group_ends_with_its_trainer(said: dict[str, Any]) -> None:
    assert said["group"] == {
        "name": "sprawl-run",
        "tasks": ["trainer", "islands", "anchor"],
        "primary": ["trainer"],
        "delay": "40s",
        "parallel": True,
    }


def test_what_is_required_is_asked_for_and_typos_are_found(said: dict[str, Any]) -> None:
    for message in said["missing"].values():
        assert "SPRAWL_BOARD" in message
    for name, right in (("trainer", "network_tier"), ("rollout-worker", "job_recovery"), ("serve", "readiness_probe")):
        assert f"did you mean '{right}'" in said["typos"][name]


def test_the_cheapest_spot_machine_of_any_cloud_is_taken(said: dict[str, Any]) -> None:
    placed, dry = said["placed"]["rollout-worker"], said["dry"]
    assert (placed["cloud"], placed["spot"], placed["hourly"]) == ("runpod", True, 0.3)
    assert (dry["cloud"], dry["instance"], dry["spot"]) == ("aws", "g5.xlarge", True)  # the next one when two are dry


def test_a_trainer_goes_only_where_there_is_a_fabric(said: dict[str, Any]) -> None:
    assert said["placed"]["trainer"]["cloud"] in ("aws", "gcp", "nebius")
    refused = said["trainer_on_runpod"]["error"]
    assert "ResourcesUnavailableError" in refused
    assert "custom_network_tier" in refused
    assert "custom_network_tier" not in said["trainer_on_runpod_without_fabric"]["error"]
    # It would be the cheapest by far, and is not taken.
    assert said["trainer_with_runpod"]["cloud"] in ("aws", "gcp", "nebius")


def test_prices_are_known_where_skypilots_own_limit_fails(said: dict[str, Any]) -> None:
    """Why the fleet looks at prices itself: GCP ignores `max_hourly_cost` for accelerators (0.14.1)."""
    assert said["price"] == 0.45
    assert said["price_unknown"] is None
    for placed in (said["capped"], said["too_dear"]):
        assert "error" in placed or placed["cloud"] == "gcp"


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_a_yaml_says_how_it_is_used_and_holds_no_logic(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    header = text.split("\nname:", 1)[0]
    assert f"sky/{path.name}" in header
    assert "Usage" in header
    for task in yaml.safe_load_all(text):
        for part in ("setup", "run"):
            if part in task:
                assert re.fullmatch(
                    r"bash sky/scripts/[a-z]+\.sh( \$\{PREFECT_FLOW_RUN_COMMAND:-\})?", task[part].strip()
                )
                assert (ROOT / task[part].split()[1]).is_file()
        for name, value in (task.get("secrets") or {}).items():
            assert value in (None, ""), name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_parses_and_is_strict(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    text = path.read_text()
    assert "set -euo pipefail" in text or "common.sh" in text


def test_what_scripts_read_is_in_their_yaml() -> None:
    """A variable that no YAML declares could not be given with --env."""
    declared = {
        name
        for path in YAMLS
        for task in yaml.safe_load_all(path.read_text())
        for part in ("envs", "secrets")
        for name in task.get(part) or {}
    }
    read = set()
    for path in (*SCRIPTS, *(ROOT / "infra" / "skypilot").glob("*.py")):
        read |= set(re.findall(r"\bSPRAWL_[A-Z_]+\b", path.read_text()))
    inner = {"SPRAWL_HOME", "SPRAWL_BIN", "SPRAWL_SIGNING_KEY", "SPRAWL_TRUSTED_KEYS"}
    fleet = {"SPRAWL_SKY_ISLAND", "SPRAWL_SKY_ANCHOR", "SPRAWL_"}
    assert read - inner - fleet <= declared


def test_common_unsets_what_is_empty_and_keeps_keys_to_itself(tmp_path: Path) -> None:
    script = f'source {ROOT}/sky/scripts/common.sh; env; stat -c %a "$SPRAWL_SIGNING_KEY"; cat "$SPRAWL_SIGNING_KEY"'
    environment = {
        "PATH": os.environ["PATH"],
        "SPRAWL_HOME": str(tmp_path / "home"),
        "AWS_ACCESS_KEY_ID": "",
        "SPRAWL_REGION": "",
        "SPRAWL_TOKEN": "t",
        "SPRAWL_SIGNING_KEY_TEXT": "line one\nline two",
        "SPRAWL_TRUSTED_KEYS_TEXT": "",
    }
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {line.split("=", 1)[0] for line in done.stdout.splitlines() if "=" in line}
    assert "SPRAWL_TOKEN" in names
    assert not names & {"AWS_ACCESS_KEY_ID", "SPRAWL_REGION", "SPRAWL_SIGNING_KEY_TEXT", "SPRAWL_TRUSTED_KEYS"}
    assert done.stdout.endswith("600\nline one\nline two\n")
