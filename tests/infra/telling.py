"""Installs the alerts, then tells what runs have to tell, in a process whose settings are those of the server it finds.

python -m tests.infra.telling WEBHOOK STILL_S
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client

from flows import server
from infra import watch
from sprawl.event_names import ISLAND_LOST, REASON, RUN_FINISHED, RUN_UNHEALTHY
from tasks.events import Occurrence, emit, published


def main(webhook: str, still_s: float) -> None:
    alerts = (replace(alert, within_s=still_s) if alert.proactive else alert for alert in watch.ALERTS)
    watch.ALERTS = tuple(alerts)
    block = CustomWebhookNotificationBlock(name="team", url=webhook, json_data={"text": "{{subject}} | {{body}}"})
    block.save("team", overwrite=True)
    with get_client(sync_client=True) as client:
        watch.install(client, notify="custom-webhook/team")
    time.sleep(3.0)  # the server's triggers take up new automations every second or two
    now = time.time()
    emit("fine", published(3, now))
    emit("fine", Occurrence(RUN_FINISHED, "3", now, {"step": 3, "message": ""}))
    emit("still", published(3, now))
    for reason, message in (("mismatch_trend", "the mismatch doubled"), ("reward", "the reward fell")):
        payload = {"reason": reason, "step": 7, "message": message}
        emit("drifting", Occurrence(RUN_UNHEALTHY, reason, now, payload, {REASON: reason}))
    for island in range(3):
        emit("losing", Occurrence(ISLAND_LOST, str(island), now, {"step": 7, "message": "an island ended"}))
    emit("lucky", Occurrence(ISLAND_LOST, "0", now, {"step": 7, "message": "an island ended"}))
    server.flush(30.0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
