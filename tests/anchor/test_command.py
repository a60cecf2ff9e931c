"""`sprawl anchor RUN` and what the flow does, on a real board."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from flows.anchor import follow
from sprawl.anchor.service import AnchorService
from sprawl.board.ledger import Ledger
from sprawl.board.store import open_store
from sprawl.cli import cli
from tests.anchor.board import RUN, anchor_config, make_board


@pytest.fixture
def board(tmp_path: Path) -> str:
    path = str(tmp_path / "board")
    make_board(open_store(path, create=True), anchor_config(8))
    return path


def test_command_and_flow_take_turns(board: str) -> None:
    """Either serves the fires that are missing and ends with the run."""

    class Stop(Exception):
        pass

    def first_only(service: AnchorService, step: int):  # type: ignore[no-untyped-def]
        if step > 4:
            raise Stop
        return service.fire(step)

    with pytest.raises(Stop):
        follow("latest", board, first_only)
    result = CliRunner().invoke(cli, ["anchor", RUN, "--board", board])
    assert result.exit_code == 0, result.output
    assert "fire 8: weights of steps [4, 0], rollouts of step 8" in result.output
    assert "fire 4" not in result.output
    assert [record.step for record in Ledger(open_store(board), RUN).fires()] == [4, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["missing"], "no run 'missing'"), ([RUN, "--run-id", "other"], "RUN is run, --run-id is other")],
)
def test_what_cannot_be_served_is_one_line(board: str, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["anchor", *arguments, "--board", board])
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
