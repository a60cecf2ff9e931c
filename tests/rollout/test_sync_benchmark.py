"""The sync benchmark's parts, and one island of it for real: what it prints adds up and is what was measured."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest
import torch
from click.testing import CliRunner

from benchmarks import sync
from benchmarks.sync_board import Link, Published, Writer, masters, step_size
from benchmarks.sync_fleet import SEGMENTS, divide
from benchmarks.sync_island import Marks
from sprawl.board.reader import VersionReader


@pytest.mark.slow
def test_one_island_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "QUICK", sync.Size((1,), 1, 0))
    result = CliRunner().invoke(sync.sync, ["--quick", "--json", "--rate", "20"])
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout.splitlines()[-1])
    rows = {(row["rate"], row["kind"]): row for row in outcome["rows"]}
    assert rows.keys() == {(rate, kind) for rate in (None, 20e6) for kind in ("delta", "whole")}
    for (rate, kind), row in rows.items():
        assert sum(row["segments"].values()) == pytest.approx(row["latency"])
        assert all(seconds >= 0 for name, seconds in row["segments"].items() if name != "rest")
        assert 0 < row["segments"]["pause"] < row["latency"] <= row["to_all"] + 1e-9
        assert row["blob_bytes"] < row["board_bytes"]
        if kind == "delta":
            assert 0.003 < row["changed_share"] < 0.03
            assert row["board_bytes"] < 0.03 * rows[rate, "whole"]["board_bytes"]
    whole = rows[20e6, "whole"]
    assert whole["segments"]["fetch"] > 0.8 * whole["blob_bytes"] / 20e6  # the link was limited
    (pause,) = outcome["pauses"]
    assert pause["delta"] > 0
    assert pause["reload"] > 0


def test_segments_follow_each_other() -> None:
    published = Published(3, False, 1.0, began=100.0, done=100.2, bytes=7, changed_share=0.01)
    marks = Marks(seen=101.0, fetch_s=0.25, bytes=7, preparing=101.0, prepared=101.5, staged=101.75, patched=102.0)
    step = divide(published, marks, pause=0.5, answered=103.0)
    assert [getattr(step, name) for name in SEGMENTS] == pytest.approx([0.2, 0.8, 0.25, 0.25, 0.25, 0.25, 0.5, 0.5])
    early = divide(published, Marks(**{**vars(marks), "seen": 100.125}), pause=0.5, answered=103.0)
    assert (early.commit, early.discover) == (0.125, 0.0)  # seen before the commit was durable


def test_the_step_changes_the_share_that_was_asked_for() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = {"w": (torch.randn(512, 512, generator=generator) * 0.05).bfloat16()}
    moving = masters(weights, generator)
    assert float((moving["w"].bfloat16() != weights["w"]).float().mean()) < 0.01  # but at powers of two
    for share in (0.01, 0.05):
        old = moving["w"].bfloat16()
        direction = torch.randn(512, 512, generator=generator).clamp_(-1, 1)
        new = (moving["w"] + step_size(moving, share) * direction).bfloat16()
        assert float((old != new).float().mean()) == pytest.approx(share, rel=0.2)


def test_deltas_and_whole_checkpoints_are_one_chain(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "board", sync.TINY, 0.01, "float32")
    served = VersionReader(writer.store, "sync").materialise(0)
    for whole in (False, True, False):
        writer.step()
        published = writer.publish(whole=whole)
        reader = VersionReader(writer.store, "sync")
        reader.commit(served, reader.prepare(served, published.version))
        assert reader.bytes_read == published.bytes
        assert (published.bytes > 0.5 * writer.full_bytes) == whole
        assert 0 < published.began <= published.done <= time.time()


def test_readers_share_the_link(tmp_path: Path) -> None:
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "blob").write_bytes(bytes(300_000))
    (tmp_path / "secret").write_bytes(b"x")

    async def scenario() -> None:
        link = Link(tmp_path / "board")
        link.rate = 2e6
        async with link.serving() as url, httpx.AsyncClient() as client:
            started = time.monotonic()
            answers = await asyncio.gather(*(client.get(f"{url}/blob") for _ in range(4)))
            assert time.monotonic() - started >= 4 * 300_000 / link.rate - 0.05
            assert [len(answer.content) for answer in answers] == [300_000] * 4
            assert link.sent == 4 * 300_000
            assert (await client.head(f"{url}/blob")).headers["content-length"] == "300000"
            for missing in ("none", "%2e%2e/secret"):
                assert (await client.get(f"{url}/{missing}")).status_code == 404

    asyncio.run(scenario())
