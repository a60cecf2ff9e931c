"""The benchmark of orchestration: what it computes from its measurements, and that the flow drives its idle run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.idle import IdleSession
from benchmarks.orchestration import Memory, Turn, compare, drive_flow, drive_plain, table


def test_what_is_added_is_the_difference_of_the_means() -> None:
    plain = [Turn([1.0, 1.0], 0.2, 0.0), Turn([1.0, 1.2], 0.2, 0.0)]
    flow = [Turn([1.01, 1.01], 0.5, 2.0), Turn([1.01, 1.25], 0.5, 4.0)]
    row = compare(1.0, plain, flow, server_cpu_s=1.2)
    assert row.steps == 4
    assert row.added_s == pytest.approx(0.02)
    assert row.median_s == pytest.approx(0.01)
    assert row.share == pytest.approx(0.02)
    assert row.cpu_s == pytest.approx(0.15)
    assert row.server_cpu_s == pytest.approx(0.3)
    assert row.once_s == pytest.approx(3.0)
    assert compare(0.0, plain, flow, 0.0).share is None
    lines = table([row], Memory(1000, {10: 100.0, 20: 101.0}, 2.0)).splitlines()
    assert lines[2] == ("| 1 s | 4 | 1.0500 s | 1.0700 s | 20.0 ms | 2.00 % | 10.0 ms | 150.0 ms | 300.0 ms | 3.0 s |")
    assert lines[-1] == "| 1000 | 10: 100.0 MiB, 20: 101.0 MiB | 2.00 KiB |"


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_flow_and_plain_loop_do_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    driven, turns = [], []
    for drive in (drive_plain, lambda session, steps: drive_flow(session, steps, 2)):
        session = IdleSession(5, 0.01)
        turn = drive(session, 4)
        assert len(turn.steps) == 3
        assert all(step >= 0.01 for step in turn.steps)
        turns.append(turn)
        driven.append([record.step for record in session.ledger.steps()])
    assert driven == [[1, 2, 3, 4]] * 2
    plain, flow = turns
    assert flow.once_s > plain.once_s, "two flow runs begin and end; the plain loop's is an estimate around nothing"
