"""What closes a run: its books are written up and held against what a correct run can never say."""

from __future__ import annotations

from sprawl.board.verify import verify_board
from sprawl.report.data import load_run
from sprawl.report.violations import find_violations
from sprawl.rollout.client.metrics import ClientMetrics
from sprawl.run.controller import Report
from sprawl.run.opening import TakenRun
from sprawl.run.receipts import FinishReceipt


def close_books(run: TakenRun, head: int, asked: ClientMetrics, report: Report) -> FinishReceipt:
    """Write down what the islands and the client say, rebuild and check every version on the board, and look for
    violations in the whole ledger. `head`: the last step; `asked`: of the client that the run sampled with."""
    for island in run.ledger.islands():
        report(
            "island_report",
            f"{island.island_id}: {island.versions_verified} of {island.versions_applied} versions verified",
            {
                "island_id": island.island_id,
                "versions_applied": island.versions_applied,
                "versions_verified": island.versions_verified,
            },
            head,
        )
    retried = asked.attempts - asked.hedges - asked.groups
    message = f"{asked.groups} groups answered; {retried} attempts failed, {asked.hedges} were hedges"
    report("client_report", message, dict(asked.snapshot()), head)
    checked = verify_board(run.store, run.run_id, trust=run.trust)
    report(
        "verify",
        f"{checked.versions} versions rebuilt from {checked.keyframes} keyframes",
        {"checked": checked.versions, "keyframes": checked.keyframes, "problems": checked.problems},
        head,
    )
    violations = find_violations(load_run(run.store, run.run_id), finished=True)
    report("finish", f"{head} steps, {len(violations)} violations", {}, head)
    return FinishReceipt(run.run_id, head, checked.versions, violations)
