"""Wrong input, of its whole kind: every command that takes a file, a board, a run or a number is given a wrong one.

Each ends with exit code 2 and one line on stderr, which names the thing and what to do about it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import sprawl.cli
from sprawl.board.ledger import Ledger
from sprawl.board.store import open_store
from tests.board.states import RUN, publish
from tests.report.plausible import make_run_record, make_step

STUDY = "configs/compare/report.yaml"
CONFIG = "configs/tiny.yaml"

# Commands with BOARD where the board goes; RUN is the run's.
ON_A_BOARD = {
    "metrics export": "metrics export RUN --board BOARD",
    "report": "report RUN --board BOARD",
    "anchor": "anchor RUN --board BOARD",
    "fleet status": "fleet status RUN --board BOARD --fleet none",
    "fleet look": "fleet look RUN --board BOARD --fleet none",
    "fleet run": "fleet run RUN --board BOARD --fleet none",
    "fleet reap": "fleet reap RUN --board BOARD --fleet none",
    "board verify": "board verify BOARD RUN",
    "board gc": "board gc BOARD RUN --keep 3",
    "board pull": "board pull BOARD RUN {tmp}/copy",
    "board merge": "board merge BOARD RUN",
    "board export": "board export BOARD RUN {tmp}/layout",
    "resume": "resume RUN --board BOARD --runner plain",
}
# Places where a board should be, and what has to be said about them.
NO_BOARD = {
    "missing": ("{tmp}/nowhere", "the directory does not exist"),
    "file": ("{tmp}/text", "is a file, not a directory"),
    "unknown scheme": ("foo://bucket/runs", "Protocol not known: foo"),
    "empty": ("{tmp}/empty-board", "no run"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A board with one run, and things that are not what a command wants."""
    tmp = tmp_path_factory.mktemp("wrong")
    store = open_store(str(tmp / "board"), create=True)
    ledger = Ledger(store, RUN)
    ledger.create_run(make_run_record(run_id=RUN))
    publish(store, 3)
    for step in (1, 2):
        ledger.write_step(make_step(step))
    damaged = tmp / "damaged" / "run-2"
    damaged.mkdir(parents=True)
    (damaged / "run.json").write_text('{"run_id"')
    (tmp / "empty-board").mkdir()
    (tmp / "directory").mkdir()
    (tmp / "text").write_text("steps: [1\n")
    (tmp / "key.yaml").write_text("stepz: 3\n")
    (tmp / "list.yaml").write_text("- 1\n")
    (tmp / "nothing.yaml").write_text("")
    (tmp / "binary").write_bytes(bytes(range(128, 256)))
    (tmp / "list.json").write_text("[1]")
    (tmp / "shapeless.json").write_text('{"model_type": "qwen2", "hidden_size": "many"}')
    for name, value in (("old", 1.0), ("new", 1.5)):
        save_file({"w": torch.full((64,), value, dtype=torch.bfloat16)}, tmp / f"{name}.safetensors")
    (tmp / "cut.safetensors").write_bytes((tmp / "old.safetensors").read_bytes()[:-2])
    return tmp


@pytest.fixture
def said(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a command that has to fail; returns its one line."""

    def run(command: str, *arguments: str) -> str:
        argv = [*(part.format(tmp=place) for part in command.split()), *arguments]
        monkeypatch.delenv("SPRAWL_BOARD", raising=False)
        monkeypatch.setattr(sys, "argv", ["sprawl", *argv])
        with pytest.raises(SystemExit) as ended:
            sprawl.cli.main()
        err = capsys.readouterr().err
        assert ended.value.code == 2, err
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("sprawl: ")
        return lines[0]

    return run


def has_a_fix(line: str) -> bool:
    return line.endswith(")") and " (" in line


@pytest.mark.parametrize("kind", NO_BOARD)
@pytest.mark.parametrize("command", ON_A_BOARD)
def test_a_board_that_is_none(command: str, kind: str, said, place: Path) -> None:
    board, expected = NO_BOARD[kind]
    line = said(ON_A_BOARD[command].replace("BOARD", board).replace("RUN", "latest"))
    assert expected in line
    assert has_a_fix(line)
    assert not (place / "nowhere").exists()


@pytest.mark.parametrize("name", ["gone", "../board", "run-2"])
@pytest.mark.parametrize("command", ON_A_BOARD)
def test_a_run_that_is_none(command: str, name: str, said) -> None:
    board = "{tmp}/damaged" if name == "run-2" else "{tmp}/board"
    line = said(ON_A_BOARD[command].replace("BOARD", board).replace("RUN", name))
    assert name in line
    assert has_a_fix(line)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("{tmp}/gone.yaml", "at {tmp}/gone.yaml ("),
        ("{tmp}/directory", "cannot read {tmp}/directory: Is a directory (give a YAML file"),
        ("{tmp}/binary", "cannot read {tmp}/binary: not text (give a YAML file"),
        ("{tmp}/text", "{tmp}/text: not valid YAML: "),
        ("{tmp}/list.yaml", "got list (write lines of `name: value`)"),
        ("{tmp}/nothing.yaml", "is required"),
        ("{tmp}/key.yaml", "unknown key 'stepz'"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        "run FILE --runner plain",
        "plan FILE",
        "compare FILE --list",
        "fleet look --board {tmp}/board --fleet none --settings FILE",
    ],
)
def test_a_file_that_is_no_config(command: str, file: str, expected: str, said, place: Path) -> None:
    if file == "{tmp}/nothing.yaml":
        expected = "got nothing (write lines of `name: value`)"
    assert expected.format(tmp=place) in said(command.replace("FILE", file))


@pytest.mark.parametrize(
    ("given", "expected"),
    [("steps", "is not of the form"), ("a=[1", "the value is not valid YAML"), ("nme=1", "unknown key 'nme'")],
)
@pytest.mark.parametrize(
    "option",
    [
        f"run {CONFIG} --runner plain --set",
        f"plan {CONFIG} --set",
        f"plan {CONFIG} --assume",
        f"plan {CONFIG} --price",
        "fleet look --board {tmp}/board --fleet none --set",
    ],
)
def test_a_setting_that_is_none(option: str, given: str, expected: str, said) -> None:
    line = said(option, given)
    assert expected in line
    if given != "nme=1":
        assert f"{option.split()[-1]} '" in line


@pytest.mark.parametrize(
    "command",
    [
        f"plan {CONFIG} --islands -2",
        f"plan {CONFIG} --price trainer=-5",
        f"plan {CONFIG} --assume changed_share=-1",
        f"plan {CONFIG} --set steps=-3",
        f"compare {STUDY} --list --parallel -1",
        f"compare {STUDY} --list --seed -1",
        "anchor --wait -1",
        "anchor --wait nan",
        "fleet run --every inf",
        "fleet run --every -1",
        "fleet reap --drain -1",
        "fleet look --board {tmp}/board --fleet none --set max_islands=-1",
        "delta stats {tmp}/old.safetensors {tmp}/new.safetensors --push -1",
        "delta stats {tmp}/old.safetensors {tmp}/new.safetensors --push nan",
        "board gc {tmp}/board latest --keep -1",
        "board pull {tmp}/board latest {tmp}/copy --version -1",
        "board merge {tmp}/board latest --from -1",
        "board import {tmp}/directory {tmp}/board --keyframe-every -1",
        "board export {tmp}/board latest {tmp}/layout --full-every -1",
    ],
)
def test_a_number_that_is_out_of_range(command: str, said) -> None:
    *_, option, value = command.split()
    assert option in (line := said(command)) or value.partition("=")[0] in line


@pytest.mark.parametrize("model", ["directory", "gone", "text", "binary", "list.json", "shapeless.json"])
def test_a_model_that_is_none(model: str, said) -> None:
    line = said(f"plan {CONFIG} --model {{tmp}}/{model}")
    assert has_a_fix(line)
    assert "--model" in line or "config.json of the model" in line


def test_nothing_is_exported_when_the_last_version_is_not_there(said, place: Path) -> None:
    assert "no version 99: it has 0 to 2" in said("board export {tmp}/board latest {tmp}/layout-99 --to 99")
    assert list((place / "layout-99").iterdir()) == []


def test_an_option_of_the_other_table_is_refused(said) -> None:
    assert "--set publish.dtype=FORMAT" in said(f"plan {CONFIG} --served mxfp4")


@pytest.mark.parametrize("file", ["gone", "directory", "text", "binary", "cut.safetensors"])
@pytest.mark.parametrize("command", ["delta stats", "delta encode -o {tmp}/x.delta"])
@pytest.mark.parametrize("side", ["old", "new"])
def test_a_checkpoint_that_is_none(command: str, side: str, file: str, said) -> None:
    files = {"old": "{tmp}/old.safetensors", "new": "{tmp}/new.safetensors"} | {side: f"{{tmp}}/{file}"}
    line = said(f"{command} {files['old']} {files['new']}")
    assert file in line
    assert has_a_fix(line)


@pytest.mark.parametrize("file", ["gone", "directory", "text", "binary", "nothing.yaml"])
def test_a_delta_that_is_none(file: str, said) -> None:
    line = said(f"delta apply {{tmp}}/old.safetensors {{tmp}}/{file} -o {{tmp}}/rebuilt")
    assert file in line
    assert has_a_fix(line)


@pytest.mark.parametrize("target", ["text/below", "text/below/deeper"])
@pytest.mark.parametrize(
    "command",
    [
        "metrics export --board {tmp}/board --parquet TARGET",
        "metrics export --board {tmp}/board --tensorboard TARGET",
        "delta stats {tmp}/old.safetensors {tmp}/new.safetensors --plot TARGET",
        "delta encode {tmp}/old.safetensors {tmp}/new.safetensors -o TARGET",
        "board pull {tmp}/board latest TARGET",
        "board export {tmp}/board latest TARGET",
        "board keygen TARGET",
    ],
)
def test_a_target_below_a_file(command: str, target: str, said, place: Path) -> None:
    line = said(command.replace("TARGET", f"{{tmp}}/{target}"))
    assert str(place / "text") in line
    assert has_a_fix(line)


@pytest.mark.parametrize("key", ["gone", "directory", "text", "binary"])
@pytest.mark.parametrize(
    "command",
    [
        "board verify {tmp}/board latest --trusted KEY",
        "board pull {tmp}/board latest {tmp}/copy --trusted KEY",
        "board merge {tmp}/board latest --key KEY",
    ],
)
def test_a_key_that_is_none(command: str, key: str, said) -> None:
    line = said(command.replace("KEY", f"{{tmp}}/{key}"))
    assert key in line
    assert has_a_fix(line)
