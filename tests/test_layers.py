"""Dependencies point one way: flows -> tasks -> sprawl, infra -> sprawl, and flows may use infra."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"flows", "tasks", "infra", "sprawl", "benchmarks", "tests"}
MAY_IMPORT = {
    "flows": {"flows", "tasks", "infra", "sprawl"},
    "tasks": {"tasks", "sprawl"},
    "infra": {"infra", "sprawl"},
    "sprawl": {"sprawl"},
}
FOREIGN = {"prefect", "sky"}


def imported(path: Path) -> set[str]:
    """The packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {str(path.relative_to(ROOT)): imported(path) & (OURS - MAY_IMPORT[package]) for path in files}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_the_library_knows_neither_prefect_nor_skypilot() -> None:
    knowing = [str(path.relative_to(ROOT)) for path in (ROOT / "sprawl").rglob("*.py") if imported(path) & FOREIGN]
    assert knowing == []
