"""Run YAMLs: wrong ones get one line that names the field and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sprawl.config import apply_overrides, load_config, parse_config
from sprawl.errors import ConfigError

MINIMAL = {"name": "t", "steps": 3, "policy": {"base": "x"}}


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path: Path) -> None:
    assert load_config(path).name == path.stem


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"anchr": {}}, "unknown key 'anchr', did you mean 'anchor'?"),
        ({"anchor": {"evry": 3}}, "unknown key 'anchor.evry', did you mean 'every'?"),
        ({"steps": 0}, "'steps': Input should be greater than 0"),
        ({"steps": "many"}, "'steps': Input should be a valid integer"),
        ({"name": "Has Space"}, "'name'"),
        ({"optimizer": {"kind": "sgd"}}, "'optimizer.kind': Input should be 'adamw' or 'muon'"),
        ({"optimizer": {"muon": {"momentm": 0.9}}}, "unknown key 'optimizer.muon.momentm', did you mean 'momentum'?"),
        (
            {"boundary": {"codec": "zip"}},
            "'boundary.codec': Input should be 'dense', 'prf', 'subspace' or 'quantized-prf'",
        ),
        ({"anchor": {"every": 15}}, "anchor.every=15 must be a multiple of checkpoint.every=10"),
        ({"anchor": {"forecast": "cubic"}}, "'anchor.forecast': Input should be 'secant', 'window', 'fit4' or 'stale'"),
        ({"anchor": {"window": 1}}, "'anchor.window': Input should be greater than or equal to 2"),
        (
            {
                "anchor": {"replay": "matching", "lag": 2},
                "rollout": {"max_staleness": 2},
                "checkpoint": {"every": 2},
            },
            "anchor.replay=matching needs anchor.lag=2 above rollout.max_staleness=2",
        ),
        ({"checkpoint": {"whole_every": 0}}, "'checkpoint.whole_every': Input should be greater than 0"),
        ({"boundary": {"codec": "quantized-prf", "bits": 5}}, "'boundary.bits': Input should be 3, 4 or 8"),
        (
            {"boundary": {"codec": "subspace"}, "anchor": {"enabled": False}},
            "boundary.codec=subspace needs anchor.enabled: true",
        ),
        (
            {"grpo": {"off_policy": {"kind": "tis"}}},
            "grpo.off_policy.kind=tis needs boundary.codec=dense, or grpo.off_policy.through_codec: true",
        ),
        ({"grpo": {"off_policy": {"icepop_low": 6}}}, "icepop_low=6 must be below icepop_high=5"),
        ({"grpo": {"overlong": {"kind": "penalty"}}}, "buffer belongs to kind: penalty, which needs it"),
        (
            {"grpo": {"overlong": {"kind": "penalty", "buffer": 9}}},
            "grpo.overlong.buffer=9 is above rollout.max_new_tokens=8",
        ),
        ({"grpo": {"minibatches": 17}}, "grpo.minibatches=17 is above rollout.prompts=16"),
        (
            {
                "deterministic": True,
                "anchor": {"enabled": False},
                "rollout": {"follow": "demand", "max_staleness": 2},
                "grpo": {"refill_rounds": 1},
            },
            "grpo.refill_rounds with deterministic: true needs rollout.max_staleness <= 1",
        ),
        ({"deterministic": True, "anchor": {"blocking": True}}, "rollout.follow=eager needs deterministic: false"),
        ({"deterministic": True, "rollout": {"follow": "demand"}}, "needs anchor.blocking: true"),
        ({"policy": {"base": "x", "stages": 2, "split": [1]}}, "policy.split has 1 entries but policy.stages=2"),
    ],
)
def test_wrong_field_is_named(change: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({**MINIMAL, **change}, "run.yaml")
    assert str(caught.value).startswith("run.yaml: ")
    assert expected in str(caught.value)


def test_missing_fields_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"'name' is required.*'steps' is required.*'policy' is required"):
        parse_config({})


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "a: [1"])
def test_yaml_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load_config(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run config at .*nope\.yaml"):
        load_config(tmp_path / "nope.yaml")


def test_overrides_reach_nested_fields_and_are_validated(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    assert load_config(path, ["anchor.enabled=false", "steps=9"]).anchor.enabled is False
    with pytest.raises(ConfigError, match="did you mean 'enabled'"):
        load_config(path, ["anchor.enabeld=false"])
    with pytest.raises(ConfigError, match="not of the form"):
        load_config(path, ["anchor.enabled"])
    with pytest.raises(ConfigError, match="'name' is not a section"):
        apply_overrides(MINIMAL, ["name.x=1"])


def test_round_trip_through_the_run_record() -> None:
    config = parse_config(MINIMAL)
    assert parse_config(config.model_dump(mode="json")) == config
