"""Engines by name."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from sprawl.errors import SprawlError
from sprawl.rollout.engines import EngineContext, equip, work_directory
from sprawl.rollout.host_copy import MemoryCopy
from sprawl.rollout.listen import IslandSettings
from tests.rollout.processes import CONFIG
from tests.rollout.support import character_tokenizer, go


def context(tmp_path: Path, arguments: str = "") -> EngineContext:
    files = {"config.json": json.dumps(CONFIG).encode()}
    return EngineContext("run-1", files, character_tokenizer(), "float32", 1, arguments, tmp_path)


def test_the_embedded_engine_is_fed_from_memory(tmp_path: Path) -> None:
    equipment = equip("torch", context(tmp_path))
    assert equipment.engine.info()["kind"] == "torch"
    assert isinstance(equipment.copy, MemoryCopy)
    go(equipment.engine.close())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SprawlError, match="--engine-args"):
        equip("torch", context(tmp_path, "--max-num-seqs 4"))


def test_unknown_and_missing_engines_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(SprawlError, match="no engine named 'vlm'"):
        equip("vlm", context(tmp_path))
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(SprawlError, match="needs vLLM"):
            equip("vllm", context(tmp_path))


def settings(**changes: str) -> IslandSettings:
    return IslandSettings(board="runs", run_id=None, **changes)  # type: ignore[arg-type]


def test_a_named_island_finds_its_directory_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with work_directory(settings(island_id="east"), "run-1") as one:
        assert one == tmp_path / ".sprawl" / "islands" / "run-1" / "east"
        one.mkdir(parents=True)
    assert one.exists()
    with work_directory(settings(work_dir="here"), "run-1") as two:
        assert two == tmp_path / "here"
    with work_directory(settings(), "run-1") as three:
        (three / "file").write_text("")
    assert not three.exists()
