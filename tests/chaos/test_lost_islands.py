"""Islands as real processes, killed with -9 while they generate: no group is lost, and none is another group than it
would have been."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from pathlib import Path

import pytest

from sprawl.board.records import IslandRecord
from sprawl.rollout.client import RolloutClient
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, SamplingParams, VersionPolicy
from tests.rollout.processes import DiskRun, command, process, wait_for
from tests.rollout.support import go

GROUPS, SAMPLES, TOKENS = 18, 4, 160


def requests() -> list[GenerateRequest]:
    return [
        GenerateRequest(
            input_ids=[3 + number, 5, 7],
            sampling_params=SamplingParams(
                n=SAMPLES, max_new_tokens=TOKENS, seeds=[100 * number + row for row in range(SAMPLES)]
            ),
            weight_version=VersionPolicy(exact_version=0),
        )
        for number in range(GROUPS)
    ]


class Fleet:
    """Islands of one run, by name."""

    def __init__(self, run: DiskRun, place: Path, exits: contextlib.ExitStack) -> None:
        self.run, self.place, self.exits = run, place, exits
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        argv = command(self.run, "--island-id", name, "--exit-with-parent", "--follow", "demand")
        self.processes[name] = self.exits.enter_context(process(argv, self.place / f"{name}.log"))

    def ready(self, *names: str) -> None:
        log = self.place / f"{names[-1]}.log"
        wait_for(lambda: {r.island_id for r in self.records() if r.state == "ready"} >= set(names), log, 120)

    def records(self) -> list[IslandRecord]:
        return self.run.ledger.islands()

    def kill(self, name: str) -> None:
        self.processes[name].kill()  # SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("continuation", [False, True], ids=["anew", "continued"])
def test_killed_islands_lose_no_group(tmp_path: Path, continuation: bool) -> None:
    run = DiskRun(tmp_path / "runs")
    run.publish()

    async def scenario(fleet: Fleet) -> tuple[list[GenerateResponse], RolloutClient]:
        async with RolloutClient(fleet.records, timeout_s=240, continuation=continuation, hedge=None) as client:
            work = asyncio.ensure_future(client.generate_many(requests()))
            for victim, after in (("a", 2), ("b", 6)):
                while client.metrics.groups < after or not busy(client, victim):
                    assert not work.done(), "over before anything was killed: make the work longer"
                    await asyncio.sleep(0.005)
                if victim == "a":
                    fleet.start("d")  # a replacement, which joins later
                fleet.kill(victim)
            return await work, client

    with contextlib.ExitStack() as exits:
        fleet = Fleet(run, tmp_path, exits)
        for name in "abc":
            fleet.start(name)
        fleet.ready("a", "b", "c")
        answers, client = go(scenario(fleet), limit_s=280)
        metrics = client.metrics
        assert len(answers) == GROUPS
        assert metrics.groups == GROUPS
        assert metrics.failures["reset"] >= 2  # each of the killed had at least one group
        assert metrics.failures["lie"] == 0

        # What an island that nobody disturbed says to the same requests: the same bits.
        quiet = [record for record in fleet.records() if record.island_id == "c"]

        async def undisturbed() -> list[GenerateResponse]:
            async with RolloutClient(lambda: fresh(quiet), timeout_s=240) as alone:
                return await alone.generate_many(requests())

        for answer, expected in zip(answers, go(undisturbed(), limit_s=280), strict=True):
            for sample, twin in zip(answer.samples, expected.samples, strict=True):
                assert (sample.token_ids, sample.logprobs) == (twin.token_ids, twin.logprobs)
                assert sample.finish_reason == twin.finish_reason
        islands = [[span.island_id for span in sample.spans] for answer in answers for sample in answer.samples]
        if continuation:
            assert metrics.continuations >= 1
            assert metrics.continued_tokens > 0
            assert any(len(set(names)) > 1 for names in islands)
            assert all(name in set("abcd") for names in islands for name in names)
        else:
            assert metrics.continued_tokens == 0


def busy(client: RolloutClient, name: str) -> bool:
    island = client._directory.known.get(name)
    return island is not None and island.load > 0


def fresh(records: list[IslandRecord]) -> list[IslandRecord]:
    return [record.model_copy(update={"heartbeat_at": time.time()}) for record in records]
