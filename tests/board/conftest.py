from pathlib import Path

import pytest

from sprawl.board.store import MemoryStore, Store, open_store


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore("test") if request.param == "memory" else open_store(str(tmp_path / "board"), create=True)
