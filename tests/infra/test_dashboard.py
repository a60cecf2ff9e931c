"""The Grafana dashboard asks only for what the real endpoints say."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sprawl.rollout.client.metrics import ClientMetrics
from sprawl.rollout.metrics import render
from sprawl.run.metrics import TrainerMetrics
from tests.report.plausible import make_evaluation, make_event, make_island, make_step
from tests.rollout.support import Stack, TinyRun, until

FOLDER = Path(__file__).parents[2] / "infra" / "grafana"
DASHBOARD = json.loads((FOLDER / "sprawl.json").read_text())
METRIC = re.compile(r"\bsprawl_\w+")
SELECTOR = re.compile(r"(sprawl_\w+)\{([^}]*)\}")


def queries() -> list[str]:
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    variables = [item["definition"] for item in DASHBOARD["templating"]["list"] if "definition" in item]
    return asked + variables


async def _island_page() -> str:
    async with Stack(TinyRun().publish(), follow="eager") as stack:
        await until(lambda: stack.gate.version == 0)
        stack.service.counters.count("/generate", 200, 0.1)
        return render(stack.service)


def pages() -> Iterator[str]:
    """What islands, a trainer and its client really answer."""
    yield asyncio.run(_island_page())
    trainer = TrainerMetrics("run-1", 100)
    trainer.step(make_step(1, sign_agreement=0.5, sign_age=3))
    trainer.evaluation(make_evaluation(1, 0.5))
    trainer.event(make_event("island_lost", 1))
    yield trainer.render([make_island("a")])
    client = ClientMetrics()
    client.failures["reset"] += 1
    yield client.render()


@pytest.fixture(scope="module")
def offered() -> dict[str, list[dict[str, str]]]:
    """Labels of every series by its name, read by Prometheus's own parser."""
    found: dict[str, list[dict[str, str]]] = {}
    for page in pages():
        for family in text_string_to_metric_families(page):
            if family.name.endswith("_seconds") and family.type == "histogram":
                found.setdefault(f"{family.name}_bucket", []).append({"le": "1.0"})
            for sample in family.samples:
                found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def test_every_query_asks_for_metrics_that_exist(offered: dict[str, list[dict[str, str]]]) -> None:
    asked = {name for query in queries() for name in METRIC.findall(query)}
    assert len(asked) > 30
    assert asked <= set(offered), f"no endpoint has {sorted(asked - set(offered))}"


def test_labels_that_select_exist_with_these_values(offered: dict[str, list[dict[str, str]]]) -> None:
    given = {"instance", "run_id"}  # by Prometheus and by /targets
    for query in queries():
        for name, body in SELECTOR.findall(query):
            for label, operator, value in re.findall(r'(\w+)(=|!=|=~|!~)"([^"]*)"', body):
                if label in given:
                    continue
                values = {labels.get(label) for labels in offered[name]}
                assert values - {None}, f"{name} has no label {label}"
                assert operator != "=" or value in values, f"no {name} with {label}={value}"


def test_panels_do_not_overlap_and_have_titles() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert panel["title"]
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_prometheus_configuration_finds_trainer_and_islands() -> None:
    jobs = {job["job_name"]: job for job in yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]}
    address = jobs["sprawl-trainer"]["static_configs"][0]["targets"][0]
    assert jobs["sprawl-islands"]["http_sd_configs"][0]["url"] == f"http://{address}/targets"
