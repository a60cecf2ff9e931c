"""The trainer's HTTP endpoint: Prometheus text, islands to scrape, and nothing that could hold up a run."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sprawl.board.records import IslandRecord
from sprawl.errors import SprawlError
from sprawl.run import endpoint as endpoint_module
from sprawl.run.endpoint import Endpoint, bind, bind_as_asked, parse_address, targets
from sprawl.run.metrics import TrainerMetrics
from tests.report.plausible import make_evaluation, make_event, make_island, make_step


def islands() -> list[IslandRecord]:
    now = time.time()
    return [
        make_island("a", url="https://10.0.0.7:8300", heartbeat_at=now),
        make_island("b", url="http://127.0.0.1:4711", heartbeat_at=now - 60),
    ]


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@pytest.fixture
def metrics() -> TrainerMetrics:
    metrics = TrainerMetrics("run-1", 100)
    metrics.started(3, make_step(40))
    return metrics


@pytest.fixture
def served(metrics: TrainerMetrics) -> Iterator[str]:
    listener, url = bind("127.0.0.1:0", None)
    endpoint = Endpoint(listener, "run-1", lambda: metrics.render(islands()), islands, None)
    yield url
    endpoint.close()


def test_prometheus_reads_the_newest_step_and_the_totals(served: str, metrics: TrainerMetrics) -> None:
    for step in (41, 42):
        metrics.step(make_step(step, reward=step / 100, mismatch_dense=0.5 if step == 42 else None))
    metrics.step(make_step(43, applied=False, grad_norm=float("inf")))
    metrics.evaluation(make_evaluation(40, 0.75))
    metrics.event(make_event("island_lost", 42))
    answer = httpx.get(f"{served}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(answer.text)
    assert found["sprawl_trainer_info{run_id=run-1}"] == 1
    assert found["sprawl_trainer_step"] == 43
    assert (found["sprawl_trainer_steps_planned"], found["sprawl_trainer_epoch"]) == (100, 3)
    assert found["sprawl_trainer_steps_total{outcome=applied}"] == 2  # the forty before were another process's
    assert found["sprawl_trainer_steps_total{outcome=refused}"] == 1
    assert found["sprawl_trainer_grad_norm"] == float("inf")
    assert "sprawl_trainer_mismatch{view=dense}" not in found  # the newest step has no probe: no stale value
    assert found["sprawl_trainer_wire_bytes_total{what=sent,wire=boundary}"] == 3 * 470_000
    assert found["sprawl_trainer_phase_seconds_total{phase=train}"] == 3.0
    assert found["sprawl_trainer_accuracy"] == 0.75
    assert found["sprawl_trainer_events_total{kind=island_lost}"] == 1
    assert (found["sprawl_trainer_islands{state=live}"], found["sprawl_trainer_islands{state=lost}"]) == (1, 1)


def test_prometheus_finds_live_islands_and_their_scheme(served: str) -> None:
    assert httpx.get(f"{served}/targets").json() == [
        {
            "targets": ["10.0.0.7:8300"],
            "labels": {"run_id": "run-1", "island_id": "a", "__scheme__": "https"},
        }
    ]
    assert targets([], "run-1") == []


def test_other_routes_and_methods_are_refused(served: str) -> None:
    assert httpx.get(f"{served}/health").status_code == 200
    answer = httpx.get(f"{served}/")
    assert (answer.status_code, "/metrics" in answer.text) == (404, True)
    assert httpx.post(f"{served}/metrics").status_code == 501


def test_a_board_that_is_away_is_a_503_and_the_next_scrape_works(metrics: TrainerMetrics) -> None:
    away = [True]

    def find() -> list[IslandRecord]:
        if away[0]:
            raise OSError("no route to the board")
        return islands()

    listener, url = bind("0", None)
    endpoint = Endpoint(listener, "run-1", lambda: metrics.render(find()), find, None)
    try:
        assert httpx.get(f"{url}/metrics").status_code == 503
        away[0] = False
        assert httpx.get(f"{url}/metrics").status_code == 200
    finally:
        endpoint.close()


def test_a_client_that_hangs_holds_up_neither_others_nor_the_end(metrics: TrainerMetrics) -> None:
    listener, url = bind("127.0.0.1:0", None)
    endpoint = Endpoint(listener, "run-1", lambda: metrics.render([]), islands, None)
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as silent:
        silent.send(b"GET /metr")
        assert httpx.get(f"{url}/metrics").status_code == 200
        closing = threading.Thread(target=endpoint.close)
        closing.start()
        closing.join(5)
        assert not closing.is_alive()


def test_with_a_token_everything_but_health_needs_it(metrics: TrainerMetrics) -> None:
    listener, url = bind("127.0.0.1:0", "secret")
    endpoint = Endpoint(listener, "run-1", lambda: metrics.render([]), islands, "secret")
    try:
        assert httpx.get(f"{url}/health").status_code == 200
        for path in ("/metrics", "/targets"):
            assert httpx.get(url + path).status_code == 401
            assert httpx.get(url + path, headers={"Authorization": "Bearer wrong"}).status_code == 401
            assert httpx.get(url + path, headers={"Authorization": "Bearer secret"}).status_code == 200
    finally:
        endpoint.close()


def test_addresses() -> None:
    assert parse_address("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert parse_address("9464") == ("127.0.0.1", 9464)
    assert parse_address("[::1]:9464") == ("::1", 9464)
    for wrong in ("localhost", "host:99999", ""):
        with pytest.raises(SprawlError, match="no address to listen on"):
            parse_address(wrong)
    with pytest.raises(SprawlError, match="SPRAWL_TOKEN"):
        bind("0.0.0.0:0", None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SprawlError, match="is taken"):
            bind(f"127.0.0.1:{taken.getsockname()[1]}", None)


def test_a_taken_address_stops_whoever_asked_for_it_but_not_a_run_that_found_it_in_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(endpoint_module.log, "warning", lambda text, *values: said.append(text % values))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SprawlError, match="is taken"):
            bind_as_asked(address, {})
        assert bind_as_asked(None, {"SPRAWL_METRICS": address}) is None
    assert len(said) == 1
    assert said[0].startswith("no metrics for Prometheus: port")
    assert bind_as_asked(None, {}) is None
