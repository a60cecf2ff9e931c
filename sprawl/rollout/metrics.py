"""/metrics: the Prometheus text format, written by hand."""

from __future__ import annotations

from collections.abc import Mapping

from sprawl.rollout.service import Service

Labels = tuple[tuple[str, str], ...]


def render(service: Service) -> str:
    """All metrics of one island. Names start with `sprawl_`; seconds and counts in base units."""
    counters, follower = service.counters, service.reconciler
    info = service.engine.info()
    lines: list[str] = []

    def add(name: str, kind: str, help_text: str, values: Mapping[Labels, float] | float | None) -> None:
        if values is None:
            return
        rows = values if isinstance(values, Mapping) else {(): values}
        lines.append(f"# HELP sprawl_{name} {help_text}")
        lines.append(f"# TYPE sprawl_{name} {kind}")
        lines.extend(f"sprawl_{name}{_braces(labels)} {_number(value)}" for labels, value in rows.items())

    requests: dict[Labels, float] = {
        (("route", route), ("status", str(status))): count for (route, status), count in counters.requests.items()
    }
    add("ready", "gauge", "1 when requests should be sent here.", float(service.ready))
    add("failed", "gauge", "1 after a terminal failure.", float(follower.terminal_error is not None))
    add("version_applied", "gauge", "Policy version in service.", service.gate.version)
    add("version_latest_seen", "gauge", "Newest policy version seen on the board.", follower.latest_seen)
    add("versions_applied_total", "counter", "Versions put into service.", follower.versions_applied)
    add("versions_verified_total", "counter", "Of those, with the published root digest.", follower.versions_verified)
    add("prepare_seconds_total", "counter", "Downloading and decoding versions.", follower.prepare_seconds)
    add("pause_seconds_total", "counter", "Generation stood still for a swap.", follower.pause_seconds)
    add("active_requests", "gauge", "Requests that hold a ticket.", service.gate.active)
    add("waiting_requests", "gauge", "Requests that wait for a version.", len(service.gate.waiting))
    add("requests_total", "counter", "Requests answered.", requests)
    add("request_seconds_total", "counter", "Wall seconds of answered requests.", counters.request_seconds)
    add("cancelled_requests_total", "counter", "Requests stopped because the client left.", counters.cancelled)
    add("prompt_tokens_total", "counter", "Prompt tokens of answered requests.", counters.prompt_tokens)
    add("generated_tokens_total", "counter", "Tokens of answered requests.", counters.generated_tokens)
    add("engine_queued_groups", "gauge", "Groups that wait in the engine.", info.get("queued_groups"))
    return "\n".join(lines) + "\n"


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
