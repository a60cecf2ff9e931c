"""The command line: help that is quick and teaches, errors that are one line and exit with 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = [
    ["run"],
    ["resume"],
    ["report"],
    ["board"],
    ["board", "ls"],
    ["board", "verify"],
    ["board", "gc"],
    ["delta"],
    ["delta", "stats"],
    ["delta", "encode"],
    ["delta", "apply"],
    ["sidecar"],
    ["island"],
    ["anchor"],
    ["fleet"],
    ["fleet", "run"],
    ["fleet", "look"],
    ["fleet", "reap"],
    ["fleet", "status"],
    ["plan"],
    ["up"],
    ["down"],
    ["status"],
]


def sprawl(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("SPRAWL_BOARD", None)
    return subprocess.run(
        [sys.executable, "-m", "sprawl.cli", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_lists_every_command() -> None:
    output = sprawl("--help").stdout
    for command in {command[0] for command in COMMANDS}:
        assert f"  {command} " in output


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: list[str]) -> None:
    from click.testing import CliRunner

    from sprawl.cli import cli

    result = CliRunner().invoke(cli, [*command, "--help"])
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) > 6


def test_help_does_not_import_torch_or_prefect() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from sprawl.cli import cli;"
        "CliRunner().invoke(cli, ['run', '--help']); CliRunner().invoke(cli, ['--help']);"
        "print(sorted({'torch', 'prefect', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "nope.yaml"], "no run config at nope.yaml"),
        (["run", "configs/tiny.yaml", "--set", "anchor.evry=3"], "did you mean 'every'"),
        (["run", "configs/tiny.yaml", "--resume", "gone", "--board", "{tmp}/nothing"], "nothing"),
        (["run", "configs/tiny.yaml", "--resume", "x", "--set", "steps=3"], "--resume continues a run"),
        (["run", "configs/tiny.yaml", "--runner", "plain", "--up"], "--runner plain"),
        (["run", "configs/tiny.yaml", "--set", "policy.base=missing-model", "--runner", "plain"], "missing-model"),
        (["report", "latest", "--board", "{tmp}/nothing"], "nothing"),
        (["board", "verify", "{tmp}/nothing"], "nothing"),
        (["resume", "gone", "--board", "{tmp}", "--runner", "plain"], "gone"),
        (["anchor", "--board", "{tmp}", "--run-id", "gone"], "gone"),
        (["frobnicate"], "No such command"),
        (["board", "verify", "s3://127.0.0.1-nowhere/x"], "s3://127.0.0.1-nowhere/x"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments: list[str], expected: str, tmp_path: Path) -> None:
    result = sprawl(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.returncode == 2, result.stderr
    assert expected in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []  # nothing half-started left behind
