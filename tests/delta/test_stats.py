"""The sparsity report: counts against brute force, the prediction against simulation, memory against a bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from sprawl.commands.delta import delta
from sprawl.delta import elements
from sprawl.delta.encodings import foreign_sizes
from sprawl.delta.files import save_state
from sprawl.delta.state import State
from sprawl.delta.stats import delta_stats, group_of
from sprawl.delta.tally import BINS, EDGES, expected_share, fit_push
from sprawl.delta.views import FORMATS, dense_view, make_view

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
)


def masters(rate: float, rows: int = 256) -> State:
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(rows, 256, generator=generator) * 0.02 for name in NAMES}
    moved = {name: t + rate * torch.randn(t.shape, generator=generator) for name, t in state.items()}
    return {**moved, "model.norm.weight": torch.ones(256)}


def test_pieces_give_the_same_counts_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for form in ("bfloat16", "float8_e4m3_block", "nvfp4", "int4_g32"):
        old, new = make_view(masters(0), form), make_view(masters(1e-4), form)
        whole = delta_stats(old, new)
        monkeypatch.setattr(elements, "CHUNK", 1000)
        parts = delta_stats(old, new)
        monkeypatch.undo()
        for one, other in zip([*whole.groups, whole.total], [*parts.groups, parts.total], strict=True):
            assert (one.elements, one.changed, one.whole_bytes) == (other.elements, other.changed, other.whole_bytes)
        assert whole.decades == parts.decades
        assert whole.cells == parts.cells


@pytest.mark.parametrize("form", list(FORMATS))
def test_counts_against_brute_force(form: str) -> None:
    """Every format: elements are weights (codes), magnitudes are those of the dense values."""
    old, new = make_view(masters(0), form), make_view(masters(3e-4), form)
    result = delta_stats(old, new)
    weights = 4 * 256 * 256 + 256
    assert sum(decade.elements for decade in result.decades) == weights
    assert sum(binade.elements for binade in result.binades) == weights
    assert sum(group.elements for group in result.groups if group.group != "scale") == weights
    values = torch.cat([t.flatten() for t in dense_view(old).values()]).abs()
    for binade in result.binades:
        if binade.exponent is None:
            assert binade.elements == int((values == 0).sum())
        else:
            inside = (values >= 2.0**binade.exponent) & (values < 2.0 ** (binade.exponent + 1))
            assert binade.elements == int(inside.sum()), binade.exponent
    for decade in result.decades:
        if decade.exponent is not None:
            low, high = np.float32(10.0**decade.exponent), np.float32(10.0 ** (decade.exponent + 1))
            assert decade.elements == int(((values >= float(low)) & (values < float(high))).sum())
    if not FORMATS[form].quantized:
        changed = {name: int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in old}
        assert result.total.changed == sum(changed.values())
        groups = {group.group: group.changed for group in result.groups}
        assert groups["mlp"] == changed[NAMES[2]] + changed[NAMES[3]]


@pytest.mark.parametrize(("form", "mantissa"), [("bfloat16", 7), ("float16", 10), ("float8_e4m3", 3)])
def test_the_floor_is_theta_over_two_to_the_mantissa_plus_one(form: str, mantissa: int) -> None:
    """At powers of two: theta/256 for bf16, theta/2048 for fp16, theta/16 for e4m3 (times its scale)."""
    value = 0.25
    weight = torch.full((16, 16), value)
    view = make_view({"x.mlp.up_proj.weight": weight}, form)
    if FORMATS[form].quantized:  # a scale of one, so that the codes are the values
        view = {"x.mlp.up_proj.weight": weight.to(torch.float8_e4m3fn), "x.mlp.up_proj.weight_scale": torch.ones(1)}
    (binade,) = delta_stats(view, view).binades
    assert binade.exponent == -2
    assert binade.floor == value / 2 ** (mantissa + 1)


@pytest.mark.parametrize("form", ["bfloat16", "float16", "float8_e4m3", "nvfp4", "mxfp4"])
def test_prediction_explains_a_simulated_step(form: str) -> None:
    """A push of one known size in a random direction: shares by magnitude within a few standard deviations."""
    push = 2e-5
    old = masters(0, 1024)
    new = {
        n: t + push * torch.sign(torch.randn(t.shape, generator=torch.Generator().manual_seed(2)))
        for n, t in old.items()
    }
    views = [{n: t for n, t in make_view(state, form).items() if "embed" not in n} for state in (old, new)]
    for given in (push, None):
        result = delta_stats(*views, push=given)
        assert result.push == pytest.approx(push, rel=0.25 if given is None else 1e-9)
        assert result.push_is == ("fitted" if given is None else "given")
        for binade in result.binades:
            if binade.exponent is None or binade.elements < 20_000 or FORMATS[form].bits == 4:
                continue
            assert binade.predicted is not None
            measured = binade.changed / binade.elements
            deviation = (max(measured, 1e-4) / binade.elements) ** 0.5
            assert abs(measured - binade.predicted) < 4 * deviation + 0.12 * measured, binade


def test_masters_show_the_updates_that_nobody_sees() -> None:
    old, new = masters(0, 1024), masters(2e-6, 1024)
    result = delta_stats(old, new, serve=torch.bfloat16)
    plain = delta_stats(make_view(old, "bfloat16"), make_view(new, "bfloat16"))
    assert (result.total.changed, result.total.delta_bytes) == (plain.total.changed, plain.total.delta_bytes)
    assert result.push_is == "measured"
    assert result.push == pytest.approx(0.674 * 2e-6, rel=0.15), "median of a normal distribution"
    assert result.total.predicted == pytest.approx(result.total.changed / result.total.elements, rel=0.03)
    hidden = sum(cell.count for cell in result.cells if not cell.visible)
    assert hidden > 10 * result.total.changed > 0
    floor = {binade.exponent: binade.floor for binade in result.binades}
    assert any(cell.step < floor[cell.binade] for cell in result.cells if cell.visible), "small steps over a boundary"


def test_nothing_changed_and_everything_new() -> None:
    state = make_view(masters(0), "bfloat16")
    same = delta_stats(state, state)
    assert (same.total.changed, same.push) == (0, None)
    assert set(same.total.sizes.values()) == {0}
    new = delta_stats({}, state)
    assert new.total.changed == new.total.elements
    assert new.decades == []
    other = delta_stats(state, {**state, "model.norm.weight": torch.ones(2).bfloat16()})
    assert other.total.changed == 2


def test_values_that_are_no_numbers_are_counted_as_changes_only() -> None:
    old = torch.tensor([1.0, float("nan"), float("inf"), 0.0, -0.0]).bfloat16()
    new = old.clone()
    new.view(torch.int16)[1] ^= 1  # another NaN payload
    new.view(torch.int16)[4] ^= -32768  # -0.0 to +0.0
    new[0] = float("inf")
    result = delta_stats({"w": old}, {"w": new})
    assert result.total.changed == 3
    assert sum(decade.elements for decade in result.decades) == 3


def test_groups() -> None:
    assert group_of("model.layers.0.input_layernorm.weight") == "norm"
    assert group_of("model.layers.0.mlp.up_proj.weight_packed") == "mlp"
    assert group_of("model.layers.0.mlp.up_proj.weight_scale_inv") == "scale"
    assert group_of("lm_head.weight") == "embedding"
    assert group_of("x") == "other"


def test_foreign_sizes_hold_what_they_have_to() -> None:
    generator = np.random.default_rng(0)
    old = generator.integers(0, 1 << 16, 100_000, dtype=np.uint16)
    new = old.copy()
    where = generator.choice(old.size, 1000, replace=False)
    new[where] ^= generator.integers(1, 1 << 16, where.size, dtype=np.uint16)
    sizes = foreign_sizes(old, new)
    entropy = 1000 * (np.log2(100) + 1 / np.log(2) + 16) / 8  # positions and random values cannot be smaller
    assert all(0.98 * entropy < size < 4 * entropy for size in sizes.values()), sizes
    assert foreign_sizes(old, old) == {"xor": 0, "overwrite": 0, "coo": 0}


def test_fitting_is_the_inverse_of_predicting() -> None:
    spacing = np.zeros(BINS, np.int64)
    for width, count in ((1e-5, 100), (1e-4, 1000), (1e-3, 10_000)):
        spacing[np.searchsorted(EDGES, width)] = count
    for push in (1e-6, 3e-5, 5e-4):
        changed = round(expected_share(spacing, push) * 11_100)
        assert fit_push(spacing, changed) == pytest.approx(push, rel=0.05)
    assert fit_push(spacing, 0) is None
    assert fit_push(spacing, 11_100) is None


_MEASURE = """
import sys, resource
from sprawl.delta.checkpoints import Checkpoint
from sprawl.delta.stats import delta_stats
small, old, new = sys.argv[1:]
delta_stats(Checkpoint(small), Checkpoint(small))  # compiled kernels and libraries are not the point
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = delta_stats(Checkpoint(old), Checkpoint(new))
print(result.total.elements, result.total.changed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Two checkpoints of 384 MiB in two shards each, whole tensors of 192 MiB."""
    rows, columns = 24_576, 4096
    for name, rate in (("old", 0.0), ("new", 1e-6)):
        (tmp_path / name).mkdir()
        for shard in (0, 1):
            weight = torch.randn(1024, columns, generator=torch.Generator().manual_seed(shard)) * 0.02
            weight = (weight + rate).bfloat16().repeat(rows // 1024, 1)
            directory = tmp_path / name / str(shard)
            save_state({f"model.layers.{shard}.mlp.up_proj.weight": weight}, directory)
            (directory / "model.safetensors").rename(tmp_path / name / f"model-{shard}.safetensors")
    save_state({n: t.bfloat16() for n, t in masters(0).items()}, tmp_path / "small")
    arguments = [str(tmp_path / name) for name in ("small", "old", "new")]
    output = subprocess.run([sys.executable, "-c", _MEASURE, *arguments], capture_output=True, text=True, check=True)
    count, changed, grown_kib = map(int, output.stdout.split())
    assert count == 2 * rows * columns
    assert 0 < changed < count
    assert grown_kib < 300 * 1024, "two checkpoints together hold 768 MiB"


def test_the_command_draws_and_reads_urls(tmp_path: Path) -> None:
    save_state(make_view(masters(0), "bfloat16"), tmp_path / "old")
    save_state(make_view(masters(1e-5), "bfloat16"), tmp_path / "new")
    plot = tmp_path / "update.png"
    arguments = ["stats", f"file://{tmp_path}/old", f"file://{tmp_path}/new"]
    result = CliRunner().invoke(delta, [*arguments, "--push", "1e-5", "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    for text in ("predicted", "push 1.00e-05 (as given)", "XOR + zstd-1", "COO gaps", str(plot)):
        assert text in result.output
    data = json.loads(CliRunner().invoke(delta, [*arguments, "--json"]).output)
    assert data["push_is"] == "fitted"
    assert data["total"]["predicted"] == pytest.approx(data["total"]["changed"] / data["total"]["elements"], rel=1e-6)
    assert data["total"]["sizes"].keys() == {"xor", "overwrite", "coo"}
    assert data["total"]["delta_bytes"] < 0.6 * min(data["total"]["sizes"].values())
