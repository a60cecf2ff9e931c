"""The Prometheus text format."""

from __future__ import annotations

from sprawl.exposition import SECONDS, Histogram, Page


def test_a_page() -> None:
    page = Page("x_")
    page.add("up", "gauge", "Whether it is.", 1.0)
    page.add("gone", "gauge", "Without a value.", None)
    page.add("lost_total", "counter", "", {(("why", 'a "b"\\\n'), ("n", "1")): 0.5, (): 3})
    assert page.text().splitlines() == [
        "# HELP x_up Whether it is.",
        "# TYPE x_up gauge",
        "x_up 1",
        "# TYPE x_lost_total counter",
        r'x_lost_total{why="a \"b\"\\\n",n="1"} 0.5',
        "x_lost_total 3",
    ]


def test_buckets_of_a_histogram_are_cumulative() -> None:
    seconds = Histogram()
    for value in (SECONDS[0], 0.2, 0.2, 1e6):
        seconds.observe(value)
    page = Page()
    page.histogram("wait_seconds", "Waiting.", {(("route", "/x"),): seconds})
    lines = page.text().splitlines()
    assert lines[1] == "# TYPE sprawl_wait_seconds histogram"
    assert lines[2] == 'sprawl_wait_seconds_bucket{route="/x",le="0.005"} 1'
    assert 'sprawl_wait_seconds_bucket{route="/x",le="0.25"} 3' in lines
    assert 'sprawl_wait_seconds_bucket{route="/x",le="120.0"} 3' in lines
    assert lines[-3:] == [
        'sprawl_wait_seconds_bucket{route="/x",le="+Inf"} 4',
        'sprawl_wait_seconds_sum{route="/x"} 1000000.405',
        'sprawl_wait_seconds_count{route="/x"} 4',
    ]
