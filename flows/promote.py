"""Flow: a person decides whether a version of a run is promoted. The decision is written on the board, once.

The flow shows what is known about the version, then suspends: its process ends, nothing waits, and the UI offers the
form of `Decision` under "Resume". A worker starts it again with the answer, days later if need be.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, cast

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.input.actions import create_flow_run_input, read_flow_run_input
from prefect.runtime import flow_run
from pydantic import Field

from flows.parameters import Version
from sprawl.board.records import PromotionRecord
from sprawl.errors import IntegrityError, SprawlError
from sprawl.event_names import APPROVED, VERSION_PROMOTED
from tasks.artifacts import artifact_key
from tasks.events import Occurrence, emit

if TYPE_CHECKING:
    from sprawl.board.ledger import Ledger
    from sprawl.board.manifest import Manifest

PINNED = "version-asked-about"
ASKED = "promote"


class Decision(RunInput):
    """The form. Who decides is asked, because a Prefect server of one's own knows no users."""

    approve: bool = Field(False, description="Promote this version. Left off: reject it. Either way it stands.")
    by: str = Field(min_length=1, max_length=200, description="Your name, for the record.")
    reason: str = Field("", max_length=2000, description="Why, in a line.")


@flow(name="promote", flow_run_name="promote-{run_id}", persist_result=False)
def promote(
    run_id: str = "latest", version: Version | None = None, board: str | None = None, verify: bool = True
) -> dict[str, Any]:
    """Ask a person whether a version is promoted, and write the answer on the board.

    The flow run shows the facts as an artifact and waits, suspended, until somebody resumes it with the form. A version
    is decided on once. A promoted version is kept by `sprawl board gc`.

    Args:
        run_id: Run of the version ("latest" for the newest one on the board).
        version: Version to decide on. Default: the newest one at the time of asking.
        board: Directory or object-store URL of the run. Default: $SPRAWL_BOARD, else ./runs.
        verify: Rebuild the version from the board first and check it bit for bit (takes memory for the whole model).
    """
    from sprawl.board.ledger import Ledger, resolve_run
    from sprawl.board.reader import VersionReader
    from sprawl.board.signing import environment_trust
    from sprawl.board.store import open_store
    from sprawl.run.options import absolute_board

    place = absolute_board(board or os.environ.get("SPRAWL_BOARD", "runs"))
    store = open_store(place)
    # A flow without `async` gets the value; what Prefect's types say is for both kinds of callers.
    pinned = cast("dict[str, Any] | None", read_flow_run_input(PINNED))
    first = pinned is None
    if pinned is None:
        name = resolve_run(store, run_id)
        reader = VersionReader(store, name, trust=environment_trust())
        manifest = reader.require(reader.require_head() if version is None else version)
        # "latest" and "the newest" mean what they meant when the question was asked, not when it is answered.
        pinned = {"run_id": name, "version": manifest.version, "root_digest": manifest.root_digest}
    else:
        reader = VersionReader(store, pinned["run_id"], trust=environment_trust())
        manifest = reader.require(pinned["version"])
    ledger = Ledger(store, pinned["run_id"])
    _check_undecided(ledger, manifest)
    if manifest.root_digest != pinned["root_digest"]:
        raise IntegrityError(f"version {manifest.version} is no longer what was asked about ({pinned['root_digest']})")
    if first:
        if verify:
            reader.materialise(manifest.version)
        text = facts(ledger, manifest, verified=verify)
        create_markdown_artifact(
            text, key=artifact_key("promotion", ledger.run_id), description=f"Version {manifest.version}: promote it?"
        )
        create_flow_run_input(PINNED, pinned)
    form = Decision.with_initial_data(
        description=f"Version {manifest.version} of run {ledger.run_id}, root {manifest.root_digest[:16]}. "
        "The artifact of this flow run shows what is known about it."
    )
    decision = suspend_flow_run(wait_for_input=form, key=ASKED)
    record = PromotionRecord(
        version=manifest.version,
        approved=decision.approve,
        root_digest=manifest.root_digest,
        by=decision.by,
        reason=decision.reason,
        accuracy=_accuracy(ledger, manifest.version),
        flow_run=str(flow_run.id) if flow_run.id else None,
        at=time.time(),
    )
    if not ledger.write_promotion(record):
        _check_undecided(ledger, manifest)  # somebody else was faster: says who
    tell(ledger.run_id, place, record)
    return record.model_dump(mode="json")


def tell(run_id: str, board: str, record: PromotionRecord) -> None:
    payload = {"board": board, **record.model_dump(mode="json", exclude={"format"})}
    labels = {APPROVED: "true" if record.approved else "false"}
    emit(run_id, Occurrence(VERSION_PROMOTED, str(record.version), record.at, payload, labels))


def facts(ledger: Ledger, manifest: Manifest, *, verified: bool) -> str:
    """What is known about a version, as markdown."""
    from sprawl.report.text import moment, number

    step, accuracy = ledger.step(manifest.step), _accuracy(ledger, manifest.version)
    rows = [
        ("root digest", f"`{manifest.root_digest}`"),
        ("rebuilt from the board", "yes, bit for bit" if verified else "not checked"),
        ("greedy accuracy", "not evaluated" if accuracy is None else number(accuracy)),
    ]
    if step is not None:
        rows += [
            ("published", moment(step.finished_at)),
            ("reward of its step", number(step.reward)),
            ("mismatch, nats/token", number(step.mismatch)),
            ("entropy, nats/token", number(step.entropy.compression)),
        ]
    others = [record for record in ledger.promotions() if record.approved]
    lines = [f"# Promote version {manifest.version} of {ledger.run_id}?", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    lines += ["", *(f"- version {r.version} was promoted by {r.by} on {moment(r.at)}" for r in others)]
    lines += ["", "Resume this flow run to decide: the form asks for your name and the verdict. It stands."]
    return "\n".join(lines)


def _accuracy(ledger: Ledger, version: int) -> float | None:
    return next((record.accuracy for record in ledger.evaluations() if record.version == version), None)


def _check_undecided(ledger: Ledger, manifest: Manifest) -> None:
    known = ledger.promotion(manifest.version)
    if known is not None:
        verdict = "promoted" if known.approved else "rejected"
        raise SprawlError(
            f"version {known.version} of {ledger.run_id} was {verdict} by {known.by}", "a decision stands"
        )
