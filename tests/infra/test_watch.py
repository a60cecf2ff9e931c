"""Automations are installed once, follow their declaration, and leave alone what people changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

import pytest
from click.testing import CliRunner
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import DoNothing, RunDeployment, SendNotification
from prefect.events.schemas.events import Resource

from infra import watch
from infra.watch import ALERTS, EVALUATION, install
from infra.watch_commands import automations
from sprawl.errors import SprawlError
from sprawl.event_names import RUN_UNHEALTHY
from tasks import events

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        _forget_all(client)
        yield client
        _forget_all(client)


def _forget_all(client: SyncPrefectClient) -> None:
    for automation in client.read_automations():
        client.delete_automation(automation.id)


def by_name(client: SyncPrefectClient) -> dict[str, object]:
    return {automation.name: automation for automation in client.read_automations()}


def test_installing_again_changes_nothing_and_what_was_switched_off_stays_off(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(install(client).values()) == {"created"}
    assert set(install(client).values()) == {"unchanged"}
    there = by_name(client)
    assert set(there) == {alert.name for alert in ALERTS}
    assert all(isinstance(automation.actions[0], DoNothing) for automation in there.values())

    first = there[ALERTS[0].name]
    client.pause_automation(first.id)
    assert install(client)[first.name] == "unchanged"
    edited = replace(ALERTS[0], threshold=2)
    monkeypatch.setattr(watch, "ALERTS", (edited, *ALERTS[1:]))
    assert [change for change in install(client).values() if change != "unchanged"] == ["updated"]
    now = by_name(client)[first.name]
    assert (now.id, now.enabled, now.trigger.threshold) == (first.id, False, 2)


def test_alerts_reach_a_block_and_go_on_reaching_it(client: SyncPrefectClient) -> None:
    from prefect.blocks.notifications import CustomWebhookNotificationBlock

    block = CustomWebhookNotificationBlock(name="team", url="http://127.0.0.1:1/x", json_data={"text": "{{subject}}"})
    block.save("team", overwrite=True)
    assert set(install(client, notify="custom-webhook/team").values()) == {"created"}
    assert set(install(client).values()) == {"unchanged"}  # `sprawl up` does not take it away again
    for alert in ALERTS:
        (action,) = by_name(client)[alert.name].actions
        assert isinstance(action, SendNotification)
        assert action.subject == alert.subject
    for wrong in ("custom-webhook/nobody", "nonsense"):
        with pytest.raises(SprawlError, match="block"):
            install(client, notify=wrong)


def test_every_nth_version_starts_the_evaluation_of_that_version(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SprawlError, match=re.escape("choose one of 1, 5, 10, 20")):
        install(client, evaluate_every=7)
    with monkeypatch.context() as patch:
        patch.setattr(watch, "EVALUATE_DEPLOYMENT", "evaluate/nowhere")
        with pytest.raises(SprawlError, match="no deployment evaluate/nowhere"):
            install(client, evaluate_every=20)
    deployment = client.create_deployment(flow_id=client.create_flow_from_name("evaluate"), name="local")
    assert install(client, evaluate_every=20)[EVALUATION] == "created"
    assert install(client, evaluate_every=20)[EVALUATION] == "unchanged"
    automation = by_name(client)[EVALUATION]
    (action,) = automation.actions
    assert isinstance(action, RunDeployment)
    assert (action.deployment_id, action.parameters["every"]) == (UUID(str(deployment)), 20)
    matched = [version for version in range(1, 61) if automation.trigger.match.matches(resource_of(version))]
    assert matched == [20, 40, 60]

    assert install(client, evaluate_every=50)[EVALUATION] == "updated"
    assert install(client)[EVALUATION] == "unchanged"
    assert install(client, evaluate_every=0)[EVALUATION] == "removed"
    assert EVALUATION not in by_name(client)


def resource_of(version: int) -> Resource:
    labels = events.published(version, 0.0).labels
    return Resource({"prefect.resource.id": "sprawl.run.run-1", **labels})


@pytest.mark.parametrize(
    ("reason", "alerted"), [("mismatch_trend", 0), ("violation", 1), ("reward_collapse", 1), ("no_island", 1)]
)
def test_each_finding_has_its_alert(client: SyncPrefectClient, reason: str, alerted: int) -> None:
    install(client)
    resource = Resource({"prefect.resource.id": "sprawl.run.run-1", "sprawl.reason": reason})
    concerned = [
        alert.name
        for alert in ALERTS
        if alert.expect == (RUN_UNHEALTHY,) and by_name(client)[alert.name].trigger.match.matches(resource)
    ]
    assert concerned == [ALERTS[alerted].name]


def test_the_command_says_what_it_did(client: SyncPrefectClient, tmp_path) -> None:
    result = CliRunner().invoke(automations, ["--home", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.output.count("created") == len(ALERTS)
    assert CliRunner().invoke(automations, ["--home", str(tmp_path)]).output.count("unchanged") == len(ALERTS)
