"""Study files: what they say, and what is wrong with one that does not say it right."""

from __future__ import annotations

import pytest
import yaml

from sprawl.errors import ConfigError
from sprawl.study.config import load_study, parse_study
from sprawl.study.plan import plan_cells
from tests.study.support import ROOT, make_study, study_data

STUDIES = sorted((ROOT / "configs" / "compare").glob("*.yaml"))


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_arm_of_the_shipped_studies_is_a_valid_run(path, quick, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = load_study(path)
    cells = plan_cells(study, quick=quick, seeds=study.seeds[:1])
    assert len(cells) == len(study.all_arms())
    assert len({cell.run_id for cell in cells}) == len(cells)
    assert {arm.name for group in study.groups for arm in study.arms_of(group)} == {
        arm.name for arm in study.all_arms()
    }
    configs = [cell.config.model_dump_json(exclude={"steps"}) for cell in cells]
    assert len(set(configs)) == len(cells), "two arms are the same experiment"


def test_the_staleness_study_is_the_whole_grid(monkeypatch):
    monkeypatch.chdir(ROOT)
    cells = plan_cells(load_study("configs/compare/staleness.yaml"), seeds=[7])
    points = {
        (cell.config.boundary.codec, cell.config.rollout.max_staleness, cell.config.grpo.off_policy.kind)
        for cell in cells
    }
    assert points == {(c, k, o) for c in ("dense", "prf") for k in (0, 1, 4, 8, 16) for o in ("none", "tis")}
    assert all(cell.config.deterministic for cell in cells)


def test_cells_come_seed_by_seed_and_differ_in_nothing_but_arm_and_seed():
    cells = plan_cells(make_study())
    assert [cell.run_id for cell in cells] == [
        *("three-prf-anchor-s7", "three-prf-s7", "three-dense-s7"),
        *("three-prf-anchor-s8", "three-prf-s8", "three-dense-s8"),
    ]
    assert [cell.config.steps for cell in cells[:3]] == [60, 40, 40]
    first, second = cells[0].config, cells[3].config
    assert first.model_copy(update={"seed": 8}) == second
    assert first.policy.base == second.policy.base


def test_axes_are_combined_and_the_later_one_counts():
    values = [
        [{"name": "a", "overrides": {"optimizer.lr": 1e-5}}, {"name": "b", "label": "B", "steps": 5}],
        [{"name": "x", "overrides": {"optimizer.lr": 2e-5}}, {"name": "y"}],
    ]
    arms = parse_study(study_data(arms=[], axes=values)).all_arms()
    assert [(arm.name, arm.title, arm.steps) for arm in arms] == [
        *(("a-x", "a, x", None), ("a-y", "a, y", None), ("b-x", "B, x", 5), ("b-y", "B, y", 5)),
    ]
    assert arms[0].overrides == {"optimizer.lr": 2e-5}
    assert arms[1].overrides == {"optimizer.lr": 1e-5}


def test_quick_is_small_has_one_seed_and_names_of_its_own():
    cells = plan_cells(make_study(), quick=True)
    assert [cell.run_id for cell in cells] == [f"three-quick-{arm}-s7" for arm in ("prf-anchor", "prf", "dense")]
    assert {cell.config.steps for cell in cells} == {12}
    assert cells[0].config.anchor.every == 4


def test_only_and_seeds_choose():
    cells = plan_cells(make_study(), only=["prf*"], seeds=[8])
    assert [cell.run_id for cell in cells] == ["three-prf-anchor-s8", "three-prf-s8"]
    with pytest.raises(ConfigError, match=r"no arm 'sparse' \(its arms are prf-anchor, prf, dense\)"):
        plan_cells(make_study(), only=["sparse"])
    with pytest.raises(ConfigError, match="no seed 9 "):
        plan_cells(make_study(), seeds=[9])


def test_the_errors_of_all_arms_come_at_once():
    arms = [
        {"name": "one", "overrides": {"anchor.evry": 3}},
        {"name": "two", "overrides": {"boundary.codec": "subspace", "anchor.enabled": False}},
        {"name": "three", "overrides": {"problems.params": {"digits": 99}}},
        {"name": "fine"},
    ]
    with pytest.raises(ConfigError) as caught:
        plan_cells(make_study(arms=arms))
    message = str(caught.value)
    assert "arm one: " in message
    assert "did you mean 'every'" in message
    assert "arm two: " in message
    assert "arm three: " in message
    assert message.count("arm one") == 1, "once, not for every seed"
    assert "fine" not in message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arms": []}, "a study needs arms, or axes"),
        ({"seeds": [7, 7]}, "a seed is listed twice"),
        ({"arms": [{"name": "a"}, {"name": "a"}]}, "two arms are called 'a'"),
        ({"groups": [{"name": "g", "title": "t", "arms": ["nobody"]}]}, "group 'g' has no arm 'nobody'"),
        ({"arms": [{"name": "a", "overrides": {"seed": 3}}], "groups": []}, "the study's seeds says it"),
        ({"overrides": {"steps": 3}}, "the study's steps says it"),
        ({"parallell": 2}, "did you mean 'parallel'"),
    ],
)
def test_what_is_wrong_is_named(changes, says):
    with pytest.raises(ConfigError, match=says):
        make_study(**changes)


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match=r"no study at .*configs/compare"):
        load_study(tmp_path / "missing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("arms: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_study(broken)
    broken.write_text(yaml.safe_dump(["a"]))
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_study(broken)
