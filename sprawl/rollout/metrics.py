"""/metrics of an island, for Prometheus. docs/operations.md lists what is here."""

from __future__ import annotations

from typing import get_args

from sprawl.exposition import Histogram, Labels, Page
from sprawl.rollout.service import Service
from sprawl.rollout.wire import ServerState


def render(service: Service) -> str:
    """All metrics of one island."""
    page = Page()
    _weights(page, service)
    _requests(page, service)
    return page.text()


def _weights(page: Page, service: Service) -> None:
    follower, gate, info = service.reconciler, service.gate, service.engine.info()
    about = {"island_id": service.island_id, "run_id": service.served_run, "commit_mode": gate.state.mode}
    about |= {"follow": follower.follow, "engine": str(info.get("kind", "unknown"))}
    states: dict[Labels, float] = {(("state", s),): float(s == follower.state) for s in get_args(ServerState)}
    page.add("info", "gauge", "Always 1; what this island is.", {tuple(about.items()): 1.0})
    page.add("ready", "gauge", "1 when requests should be sent here.", float(service.ready))
    page.add("failed", "gauge", "1 after a terminal failure.", float(follower.terminal_error is not None))
    page.add("sync_state", "gauge", "1 for the state of the reconciler.", states)
    page.add("sync_failing", "gauge", "1 while the last attempt to advance failed.", float(bool(follower.last_error)))
    page.add("version_applied", "gauge", "Policy version in service.", gate.version)
    page.add("version_latest_seen", "gauge", "Newest policy version seen on the board.", follower.latest_seen)
    page.add("commit_pending", "gauge", "1 while a version waits for requests to let it in.", _is(gate.state.pending))
    page.add("run_switches_total", "counter", "Changes to another run.", gate.state.epoch)
    page.add("commits_begun_total", "counter", "Times that admission was shut for new weights.", gate.state.begun)
    page.add("versions_applied_total", "counter", "Versions put into service.", follower.versions_applied)
    page.add(
        "versions_verified_total", "counter", "Of those, with the published root digest.", follower.versions_verified
    )
    page.add("prepare_seconds_total", "counter", "Downloading and decoding versions.", follower.prepare_seconds)
    page.add("pause_seconds_total", "counter", "Generation stood still for a swap.", follower.pause_seconds)
    page.add("engine_queued_groups", "gauge", "Groups that wait in the engine.", info.get("queued_groups"))


def _requests(page: Page, service: Service) -> None:
    counters, connections = service.counters, service.connections
    requests: dict[Labels, float] = {
        (("route", route), ("status", str(status))): count for (route, status), count in counters.requests.items()
    }
    seconds: dict[Labels, Histogram] = {(("route", route),): h for route, h in counters.seconds.items()}
    page.add("active_requests", "gauge", "Requests that hold a ticket.", service.gate.active)
    page.add("waiting_requests", "gauge", "Requests that wait for a version.", len(service.gate.waiting))
    page.add("held_requests", "gauge", "Both, and those that are about to be.", service.held)
    page.add("held_requests_limit", "gauge", "Above it a request gets a 503.", service.max_active)
    page.add("requests_total", "counter", "Requests answered.", requests)
    page.histogram("request_seconds", "Until the answer, or the first token of a stream.", seconds)
    page.histogram("admission_seconds", "Until a request was admitted.", {(): counters.waits})
    page.add("cancelled_requests_total", "counter", "Generations stopped, the client having left.", counters.cancelled)
    page.add("turned_away_requests_total", "counter", "503s for too many requests held.", counters.turned_away)
    page.add("engine_errors_total", "counter", "Generations that the engine did not finish.", counters.engine_errors)
    page.add("prompt_tokens_total", "counter", "Prompt tokens of answered requests.", counters.prompt_tokens)
    page.add("generated_tokens_total", "counter", "Tokens of answered requests.", counters.generated_tokens)
    page.add("connections", "gauge", "Open connections.", connections.open)
    page.add("connections_refused_total", "counter", "Connections above the limit.", connections.refused)
    page.add("connections_dropped_total", "counter", "Clients that were too slow.", connections.dropped)


def _is(value: object) -> float:
    return float(value is not None)
