"""The plan of a run against counts made another way, and against what a run really measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sprawl.cli import cli
from sprawl.config import load_config
from sprawl.plan.estimate import Assumptions, Prices, delta_bytes, plan_run
from sprawl.plan.size import Size, size_of
from sprawl.plan.sizing import SHAPES, sizing
from sprawl.policy.checkpoint import load_auxiliary, load_weights, read_architecture

TINY = load_config("configs/tiny.yaml")
BASE = Path("configs/base/tiny")


def tiny_size(stages: int = 8) -> Size:
    return size_of(read_architecture(load_auxiliary(BASE)), stages)


def test_parameters_are_those_of_the_checkpoint() -> None:
    size = tiny_size()
    weights = load_weights(BASE)
    assert size.parameters == sum(tensor.numel() for tensor in weights.values())
    assert sum(size.stages) == size.parameters
    tied = size_of(SHAPES["1.5B"], 4)
    assert sum(tied.stages) == tied.parameters + tied.vocab * tied.hidden  # the last stage has a copy
    assert size_of(SHAPES["1.5B"], 1).stages == (tied.parameters,)
    assert size.served_bytes("bfloat16") == 2 * size.parameters
    assert size.served_bytes("mxfp4") < size.served_bytes("float8_e4m3") < size.served_bytes("bfloat16")


@pytest.mark.parametrize(
    ("name", "billions"), [("0.1B", 0.1345), ("1.5B", 1.54), ("7B", 7.62), ("32B", 32.8), ("70B", 70.6)]
)
def test_public_shapes_have_their_published_sizes(name: str, billions: float) -> None:
    assert size_of(SHAPES[name], 1).parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_boundary_bytes_are_counted_as_the_run_counts_them() -> None:
    found = plan_run(TINY, tiny_size(), Assumptions(prompt_tokens=8), Prices())
    tokens = 16 * 16 * (8 + 6)
    assert found.tokens == tokens
    assert found.boundary_bytes == 7 * tokens * 2 * 4 * 6  # boundaries, there and back, fp32, k of 128
    assert found.dense_boundary_bytes == 7 * tokens * 2 * 4 * 128
    assert found.sign_bytes == -(-found.parameters // 8)


@pytest.mark.parametrize(
    ("share", "measured"), [(0.00047, 296_537), (0.00245, 1_315_539), (0.01004, 4_646_343), (0.02996, 12_153_801)]
)
def test_a_delta_is_estimated_from_above(share: float, measured: int) -> None:
    """Measured by benchmarks.delta on 1 GiB of bf16 under Adam (docs/results.md)."""
    gib = Size((0,), (0,), 2**29, 0, 1, 1, 1, 1)
    assert 1.0 < delta_bytes(gib, "bfloat16", share) / measured < 1.6
    assert delta_bytes(gib, "bfloat16", 1.0) <= 2**30


def test_dollars_are_those_that_were_given() -> None:
    assert plan_run(TINY, tiny_size(), Assumptions(), Prices()).hourly == 0
    prices = Prices(trainer=50, nodes=2, island=2, anchor=1, egress_gb=0.1)
    found = plan_run(TINY, tiny_size(), Assumptions(step_seconds=36), prices, islands=10)
    egress = found.delta_bytes * 10 * 100 / 1e9 * 0.1
    assert found.dollars == {"trainer": 100, "islands": 20, "anchor": 1, "egress": pytest.approx(egress)}
    assert found.hourly == pytest.approx(121 + egress)


def test_links_and_islands() -> None:
    found = plan_run(TINY, tiny_size(), Assumptions(), Prices(), islands=4)
    assert found.links["1 Gbit/s"].keyframe_s == pytest.approx(found.served_bytes / 125e6)
    assert found.island_cache == 4 * 16 * (64 + 6) * tiny_size().kv_bytes  # a quarter of 256 samples


def test_the_sizing_table_grows_where_it_should() -> None:
    rows = {(row.model, row.islands, row.board_gbit): row for row in sizing()}
    assert rows["7B", 128, 10.0].latency_s > rows["7B", 16, 10.0].latency_s
    assert rows["7B", 128, 1.0].latency_s > 5 * rows["7B", 128, 10.0].latency_s
    assert rows["7B", 128, 1.0].mirrored_s < rows["7B", 128, 1.0].latency_s / 20
    assert rows["70B", 2, 10.0].latency_s < rows["70B", 2, 10.0].keyframe_s / 50


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    text = run(cli, ["plan", "configs/tiny.yaml", "--price", "island=1.5"])
    assert text.exit_code == 0, text.output
    assert "an hour    $3.00 (islands 3.00)" in text.output
    assert "stage 7" in text.output
    answer = json.loads(run(cli, ["plan", "configs/tiny.yaml", "--json", "--assume", "changed_share=0.02"]).output)
    assert answer["assumed"]["changed_share"] == 0.02
    assert answer["hourly"] == 0
    model = tmp_path / "config.json"
    model.write_bytes((BASE / "config.json").read_bytes())
    elsewhere = ["plan", "configs/tiny.yaml", "--set", "policy.base=not-here"]
    assert "say with --model" in str(run(cli, elsewhere).exception)
    assert run(cli, [*elsewhere, "--model", str(model)]).exit_code == 0
    assert "unknown key 'isalnd', did you mean 'island'?" in str(
        run(cli, ["plan", "configs/tiny.yaml", "--price", "isalnd=1"]).exception
    )
    assert "| 70B |" in run(cli, ["plan", "--sizing", "--served", "mxfp4"]).output


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["boundary.codec=dense"], "(dense)"),
        (["boundary.codec=prf", "boundary.ratio=0.05"], "(21.3 times less than dense)"),
        (["boundary.codec=dense", "policy.stages=1"], "none: one stage"),
    ],
)
def test_boundaries_are_compared_with_dense_only_where_they_are_not(settings: list[str], expected: str) -> None:
    options = [part for setting in settings for part in ("--set", setting)]
    result = CliRunner().invoke(cli, ["plan", "configs/tiny.yaml", *options])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if line.startswith("  boundaries")]
    assert line.endswith(expected)
    assert "1.0 times" not in result.output
