from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.records import RunRecord
from sprawl.board.store import Store, open_store
from sprawl.commands.board import board
from sprawl.errors import BoardError
from tests.board.states import RUN, publish


def run(*arguments: str) -> Result:
    return CliRunner().invoke(board, arguments, catch_exceptions=True)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


@pytest.fixture
def store(path: str) -> Store:
    store = open_store(path, create=True)
    Ledger(store, RUN).create_run(
        RunRecord(run_id=RUN, created_at=1.0, config={"steps": 9}, base_digest="", parameters=1, sprawl_version="0")
    )
    publish(store, 6)
    return store


def test_ls(store: Store, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPRAWL_BOARD", path)
    result = run("ls")
    assert result.exit_code == 0
    assert RUN in result.output
    assert result.output.splitlines()[-1].split()[-3:] == ["5", "9", "0"]


@pytest.mark.parametrize("arguments", [["{}"], ["{}", RUN], ["{}", "latest"], ["{}/" + RUN], ["{}/" + RUN + "/"]])
def test_verify_clean(store: Store, path: str, arguments: list[str]) -> None:
    result = run("verify", *[argument.format(path) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert f"{RUN}: 6 of 6 versions rebuilt and equal, 2 keyframes" in result.output
    assert "OK" in result.output


def test_verify_damage_exits_1_and_names_it(store: Store, path: str) -> None:
    (key,) = store.list(keys.blobs(RUN, 3))
    store.put(key, b"garbage")
    result = run("verify", path)
    assert result.exit_code == 1
    assert key in result.output
    assert "1 problem" in result.output


@pytest.mark.parametrize(
    "arguments", [["verify", "none"], ["ls", "none"], ["verify", "{}", "typo"], ["gc", "none", "r", "--keep", "1"]]
)
def test_wrong_places_are_user_errors(store: Store, path: str, arguments: list[str]) -> None:
    result = run(*[argument.format(path) for argument in arguments])
    assert isinstance(result.exception, BoardError)


def test_empty_board(tmp_path: Path) -> None:
    assert "has no runs" in run("ls", str(tmp_path)).output
    assert isinstance(run("verify", str(tmp_path)).exception, BoardError)


def test_gc(store: Store, path: str) -> None:
    assert "would delete 4 versions" in run("gc", path, "latest", "--keep", "2", "--dry-run").output
    assert len(store.list(keys.manifests(RUN))) == 6
    assert "deleted 4 versions" in run("gc", path, RUN, "--keep", "2").output
    assert run("verify", path).exit_code == 0
    assert run("gc", path, RUN, "--keep", "0").exit_code == 2
