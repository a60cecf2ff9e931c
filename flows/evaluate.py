"""Flow: greedy evaluation of one published version of a run, while it trains or long after."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact

from flows.parameters import Positive, Version
from sprawl.board.records import EvaluationRecord, IslandRecord
from sprawl.errors import SprawlError
from tasks.artifacts import artifact_key

if TYPE_CHECKING:
    from sprawl.board.manifest import Manifest
    from sprawl.config import RunConfig


@flow(name="evaluate", flow_run_name="evaluate-{run_id}", persist_result=False)
def evaluate(
    run_id: str = "latest",
    version: Version | None = None,
    board: str | None = None,
    problems: Positive | None = None,
    every: Positive | None = None,
) -> dict[str, Any]:
    """Decode held-out problems greedily at one version and score them.

    A sidecar of its own serves the version, so the islands of a live run are not disturbed. With the run's own number
    of problems the result is entered in the run's ledger, unless it is there already; it is then returned as it is.

    Args:
        run_id: Run to evaluate ("latest" for the newest one on the board).
        version: Version to evaluate. Default: the newest one.
        board: Directory or object-store URL of the run. Default: $SPRAWL_BOARD, else ./runs.
        problems: Number of held-out problems. Default: the run's `evaluate.problems`.
        every: Evaluate also every n-th version before it that the ledger has no evaluation of: what an automation
            that starts this flow for every n-th version may have missed.
    """
    from sprawl.board.ledger import Ledger, resolve_run
    from sprawl.board.reader import VersionReader
    from sprawl.board.signing import environment_trust
    from sprawl.board.store import open_store
    from sprawl.config import parse_config
    from sprawl.run.options import absolute_board

    place = absolute_board(board or os.environ.get("SPRAWL_BOARD", "runs"))
    store = open_store(place)
    name = resolve_run(store, run_id)
    ledger, reader = Ledger(store, name), VersionReader(store, name, trust=environment_trust())
    config = parse_config(ledger.run().config, f"run.json of {name}")
    wanted = reader.head() if version is None else version
    manifest = None if wanted is None else reader.manifest(wanted)
    if manifest is None:
        newest = reader.head()
        have = "it has none yet" if newest is None else f"the newest one is {newest}"
        raise SprawlError(f"run {name} has no version {'at all' if wanted is None else wanted}", have)

    entered = problems is None or problems == config.evaluate.problems
    if every is not None and not entered:
        raise SprawlError("every needs the run's own number of problems", "leave problems empty")
    known = {record.version: record for record in ledger.evaluations()} if entered else {}
    wanted_versions = due(manifest.version, every, known)
    manifests = [found for item in wanted_versions if (found := reader.manifest(item)) is not None]
    if manifests:
        limit = problems or config.evaluate.problems
        for measured in _measure(place, name, config, reader.files(), manifests, limit):
            known[measured.version] = measured
            if entered:
                ledger.write_evaluation(measured)
    record = known[manifest.version]
    get_run_logger().info(
        "version %d of %s: %d of %d held-out problems correct", record.version, name, record.correct, record.problems
    )
    if record.examples:
        create_table_artifact(
            table=record.examples,
            key=artifact_key("examples", name),
            description=f"Examples at version {record.version}",
        )
    return record.model_dump(mode="json", exclude={"examples"})


def due(version: int, every: int | None, known: Container[int]) -> list[int]:
    """What to evaluate, ascending: `version`, and every `every`-th before it, unless `known`."""
    before = range(every, version, every) if every else ()
    return [item for item in (*before, version) if item not in known]


def _measure(
    board: str, run_id: str, config: RunConfig, files: dict[str, bytes], manifests: Sequence[Manifest], limit: int
) -> Iterator[EvaluationRecord]:
    """Serve the versions, ascending, for as long as it takes to evaluate them."""
    from infra.sidecar import temporary_sidecar
    from sprawl.evaluate.harness import evaluate_version
    from sprawl.policy import Tokenizer
    from sprawl.problems import load_problem_set
    from sprawl.rollout.client import RolloutClient

    tokenizer = Tokenizer.from_files(files)
    problem_set = load_problem_set(config.problems.name, config.seed, config.problems.params)
    stop_ids = sorted({token for text in problem_set.stop for token in tokenizer.ids_containing(text)})
    name = f"evaluate-{manifests[-1].version}-{os.getpid()}"
    started = time.time()

    async def measure(url: str, manifest: Manifest) -> EvaluationRecord:
        def discover() -> list[IslandRecord]:
            now = time.time()
            record = IslandRecord(
                island_id=name,
                url=url,
                state="ready",
                applied=None,
                started_at=started,
                heartbeat_at=now,
                interval_s=5.0,
            )
            return [record]

        async with RolloutClient(discover, timeout_s=config.rollout.timeout_s) as client:
            return await evaluate_version(
                client,
                tokenizer,
                problem_set,
                version=manifest.version,
                step=manifest.step,
                limit=limit,
                max_new_tokens=config.rollout.max_new_tokens,
                stop_token_ids=stop_ids,
                route=config.rollout.episodes,
            )

    log = Path(".sprawl") / "logs" / run_id / f"{name}.log"
    with temporary_sidecar(board, run_id, name, log=log, threads=config.threads.island) as url:
        for manifest in manifests:
            yield asyncio.run(measure(url, manifest))
