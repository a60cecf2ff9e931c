"""`sprawl board pull`, `merge`, `keygen`, `import`, `export`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.reader import VersionReader
from sprawl.board.records import RunRecord
from sprawl.board.signing import SignatureProblem
from sprawl.board.store import Store, open_store
from sprawl.commands.board import board
from sprawl.delta.state import root_digest, tensor_digests
from sprawl.errors import BoardError, IntegrityError, SprawlError
from tests.board.states import FILES, RUN, publish, state_of


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(board, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def failure(*arguments: object) -> BaseException | None:
    return CliRunner().invoke(board, [str(argument) for argument in arguments]).exception


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def store(path: Path) -> Store:
    store = open_store(str(path), create=True)
    Ledger(store, RUN).create_run(
        RunRecord(run_id=RUN, created_at=1.0, config={"steps": 9}, base_digest="", parameters=1, sprawl_version="0")
    )
    publish(store, 6)
    return store


def test_pull(store: Store, path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert "version 3 of run-1" in run("pull", path, RUN, folder, "--version", 3).output
    output = run("pull", path, "latest", folder).output
    assert "version 5" in output
    assert root_digest(tensor_digests(load_file(folder / "model.safetensors"))) in output
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    (folder / "sprawl.json").write_text("{}")
    again = run("pull", path, "latest", folder)
    assert "thrown away" in again.stderr
    assert isinstance(failure("pull", path, "latest", folder, "--version", 99), BoardError)
    assert isinstance(failure("pull", path, "typo", folder), BoardError)


def test_a_manifest_cannot_name_files_elsewhere(store: Store, path: Path, tmp_path: Path) -> None:
    key = keys.manifest(RUN, 4)
    data = json.loads(store.get(key))
    data["files"] = {"../evil": next(iter(data["files"].values()))}
    store.put(key, json.dumps(data).encode())
    assert isinstance(failure("pull", path, RUN, tmp_path / "model"), IntegrityError)
    assert not (tmp_path / "evil").exists()


def test_merge(store: Store, path: Path) -> None:
    assert "version 0 to 5 in" in run("merge", path, "latest").output
    assert "version 1 to 4 in" in run("merge", path, RUN, "--from", 1, "--to", 4).output
    assert "2 merged deltas" in run("verify", path).output
    assert isinstance(failure("merge", path, RUN, "--from", 5), BoardError)


def test_keys_from_making_to_refusing(store: Store, path: Path, tmp_path: Path) -> None:
    key = tmp_path / "trainer.key"
    assert str(key) in run("keygen", key, "--comment", "trainer").output
    assert key.with_name("trainer.key.pub").read_text().endswith(" trainer\n")
    assert isinstance(failure("keygen", key), SprawlError)
    trusted = f"{key}.pub"
    assert run("verify", path, RUN, "--trusted", trusted, code=1).output.count("is not signed") == 6
    assert isinstance(failure("pull", path, RUN, tmp_path / "m", "--trusted", trusted), SignatureProblem)
    layout = tmp_path / "layout"
    run("export", path, RUN, layout)
    run("import", layout, tmp_path / "signed", "--key", key)
    assert "OK" in run("verify", tmp_path / "signed", "--trusted", trusted).output
    run("pull", tmp_path / "signed", "latest", tmp_path / "m", "--trusted", trusted)
    run("merge", tmp_path / "signed", "latest", "--key", key, "--trusted", trusted)
    assert "1 merged deltas" in run("verify", tmp_path / "signed", "--trusted", trusted).output


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_export_and_import(store: Store, path: Path, tmp_path: Path, encoding: str) -> None:
    layout, again = tmp_path / "layout", tmp_path / "again"
    output = run("export", path, "latest", layout, "--encoding", encoding, "--folder", "updates").output
    assert "6 versions exported" in output
    assert (layout / "latest").read_text() == "run-1/weight_v000005"
    assert (layout / "updates" / "weight_v000003" / "model.safetensors.index.json").exists()
    assert "6 versions imported" in run("import", layout, again, "--run-id", "other").output
    assert VersionReader(open_store(str(again)), "other").materialise(5).root == root_digest(
        tensor_digests(state_of(5))
    )
    assert "OK" in run("verify", again).output
    assert "other" in run("ls", again).output
    assert "0 versions imported" in run("import", layout, again, "--run-id", "other").output
    assert isinstance(failure("import", tmp_path / "none", again), BoardError)
    assert isinstance(failure("export", path, RUN, layout, "--from", 3, "--to", 2), BoardError)
