from pathlib import Path

import pytest

from sprawl.board.store import Store, open_store


@pytest.fixture
def place(tmp_path: Path) -> str:
    """URL of an empty board on disk."""
    return str(tmp_path / "board")


@pytest.fixture
def board(place: str) -> Store:
    return open_store(place, create=True)
