import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from sprawl.commands.delta import delta
from sprawl.delta.files import load_state, save_state
from sprawl.delta.state import State, root_digest, tensor_digests
from sprawl.errors import IntegrityError, SprawlError


def run(*arguments: object) -> Result:
    return CliRunner().invoke(delta, [str(argument) for argument in arguments])


def model(rate: float) -> State:
    generator = torch.Generator().manual_seed(0)
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight")
    state = {name: torch.randn(64, 64, generator=generator) * 0.02 for name in names}
    moved = {name: t + rate * torch.randn(64, 64, generator=generator) for name, t in state.items()}
    return {**{name: t.bfloat16() for name, t in moved.items()}, "model.norm.weight": torch.ones(64).bfloat16()}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    save_state(model(0), tmp_path / "old")
    (tmp_path / "old/config.json").write_text("{}")
    return tmp_path / "old"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    save_state(model(1e-5), tmp_path / "new")
    return tmp_path / "new"


def test_encode_then_apply_rebuilds_new(old: Path, new: Path, tmp_path: Path) -> None:
    file, rebuilt = tmp_path / "d.delta", tmp_path / "rebuilt"
    before = (old / "model.safetensors").read_bytes()
    encoded = run("encode", old, new / "model.safetensors", "-o", file)
    assert encoded.exit_code == 0, encoded.output
    assert file.stat().st_size < 0.2 * len(before)
    applied = run("apply", old, file, "-o", rebuilt)
    assert applied.exit_code == 0, applied.output
    expected = root_digest(tensor_digests(load_state(new)))
    assert root_digest(tensor_digests(load_state(rebuilt))) == expected
    assert expected in applied.output
    assert (rebuilt / "config.json").exists()
    assert (old / "model.safetensors").read_bytes() == before
    assert run("apply", old, file, "-o", rebuilt).exit_code == 0, "may be repeated"


def test_apply_refuses_damage_and_the_wrong_base(old: Path, new: Path, tmp_path: Path) -> None:
    file = tmp_path / "d.delta"
    run("encode", old, new, "-o", file)
    wrong = run("apply", new, file, "-o", tmp_path / "x")
    assert isinstance(wrong.exception, IntegrityError)
    file.write_bytes(file.read_bytes()[:-1])
    damaged = run("apply", old, file, "-o", tmp_path / "x")
    assert isinstance(damaged.exception, IntegrityError)
    assert "d.delta" in str(damaged.exception)
    assert not (tmp_path / "x").exists()


def test_stats(old: Path, new: Path) -> None:
    result = run("stats", old, new, "--json")
    data = json.loads(result.output)
    changed = sum((model(0)[name] != model(1e-5)[name]).sum().item() for name in model(0))
    assert data["total"]["changed"] == changed == sum(group["changed"] for group in data["groups"])
    assert [group["group"] for group in data["groups"]] == ["attention", "embedding", "mlp", "norm"]
    assert sum(decade["elements"] for decade in data["decades"]) == 3 * 64 * 64 + 64
    shares = {decade["exponent"]: decade["changed"] / decade["elements"] for decade in data["decades"]}
    assert shares[-4] > shares[-2], "small weights move more often: the floor is lower there"
    one = next(decade for decade in data["decades"] if decade["exponent"] == 0)
    assert one["floor"] == 2**-8, "half the spacing of bfloat16 at 1"
    table = run("stats", old, new)
    assert table.exit_code == 0
    assert "old magnitude" in table.output
    assert "embedding" in table.output


@pytest.mark.parametrize("command", [["stats"], ["encode", "-o", "x"]])
def test_wrong_paths_are_user_errors(old: Path, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"nope")
    (tmp_path / "empty").mkdir()
    for path in ("missing", "empty", "bad.safetensors"):
        result = run(command[0], old, tmp_path / path, *command[1:])
        assert isinstance(result.exception, SprawlError)
        assert path in str(result.exception)
    result = run("apply", old, tmp_path / "missing.delta", "-o", tmp_path / "x")
    assert isinstance(result.exception, SprawlError)


def test_a_tensor_in_two_shards_is_refused(old: Path) -> None:
    (old / "extra.safetensors").write_bytes((old / "model.safetensors").read_bytes())
    with pytest.raises(SprawlError, match="more than one shard"):
        load_state(old)
