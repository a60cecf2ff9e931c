"""Automations: what the Prefect server does by itself when a run says something (tasks/events.py lists what runs say).

Declared here, installed by name: an installation that is repeated changes nothing, one after an edit here updates, and
what people switched off in the UI stays off. Without a notification block an alert only shows in the UI's event feed;
its secret (a webhook's address) lives in the block and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from sprawl.errors import SprawlError
from sprawl.event_names import EVERY, ISLAND_LOST, REASON, RUN_FINISHED, RUN_UNHEALTHY, VERSION_PUBLISHED, resource
from sprawl.event_names import every as every_nth

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.schemas.automations import Automation, AutomationCore

EVALUATION = "sprawl: every n-th version is evaluated"
EVALUATE_DEPLOYMENT = "evaluate/local"

Change = Literal["created", "updated", "unchanged", "removed"]


@dataclass(frozen=True)
class Alert:
    """An automation that tells people: when `expect` happens `threshold` times `within_s` (0: at once) about a run, or,
    `proactive`, when after one of `after` none of `expect` comes for `within_s`."""

    name: str
    description: str
    expect: tuple[str, ...]
    subject: str
    body: str
    labels: Mapping[str, str] = field(default_factory=dict)
    threshold: int = 1
    within_s: float = 0.0
    after: tuple[str, ...] = ()
    proactive: bool = False


_RUN = "{{ event.resource.name }}"
ALERTS = (
    Alert(
        "sprawl: the mismatch of a run drifts",
        "Sampler and trainer drift apart: the mismatch grows, which precedes a collapse.",
        (RUN_UNHEALTHY,),
        f"Run {_RUN}: the mismatch drifts",
        f"{_RUN}: {{{{ event.payload.message }}}} (step {{{{ event.payload.step }}}})",
        labels={REASON: "mismatch_trend"},
    ),
    Alert(
        "sprawl: a run needs attention",
        "A violation on the ledger, a reward that collapsed, or no island left.",
        (RUN_UNHEALTHY,),
        f"Run {_RUN} needs attention",
        f"{_RUN}: {{{{ event.payload.message }}}} (step {{{{ event.payload.step }}}})",
        labels={REASON: "!mismatch_trend"},
    ),
    Alert(
        "sprawl: islands are being lost",
        "Three islands of a run lost within ten minutes.",
        (ISLAND_LOST,),
        f"Run {_RUN}: islands are being lost",
        f"{_RUN}: three islands lost in ten minutes, last: {{{{ event.payload.message }}}}",
        threshold=3,
        within_s=600.0,
    ),
    Alert(
        "sprawl: a run stands still",
        "A version was published, and for half an hour neither another one nor the end of the run.",
        (VERSION_PUBLISHED, RUN_FINISHED),
        f"Run {_RUN} stands still",
        f"{_RUN}: nothing published for half an hour",
        after=(VERSION_PUBLISHED,),
        within_s=1800.0,
        proactive=True,
    ),
)


def install(
    client: SyncPrefectClient, *, notify: str | None = None, evaluate_every: int | None = None
) -> dict[str, Change]:
    """Create or update the automations on the server of `client`; returns what happened to each, by name.

    notify: block `type/name` whose `notify` is called (`slack-webhook/team`); None: whom they tell stays as it is.
    evaluate_every: start the deployment `evaluate/local` for each n-th version; 0: no longer; None: stays as it is.
    Raises SprawlError: no such block or deployment, or an interval that versions are not labelled with.
    """
    there = {automation.name: automation for automation in client.read_automations()}
    block = _block_id(client, notify) if notify is not None else None
    changes: dict[str, Change] = {}
    for alert in ALERTS:
        known = there.get(alert.name)
        actions = _actions(alert, block) if block is not None else _told(alert, known)
        changes[alert.name] = _put(client, known, _automation(alert.name, alert.description, _trigger(alert), actions))
    known = there.get(EVALUATION)
    if evaluate_every:
        changes[EVALUATION] = _put(client, known, _evaluation(client, evaluate_every))
    elif evaluate_every == 0 and known is not None:
        client.delete_automation(known.id)
        changes[EVALUATION] = "removed"
    elif known is not None:
        changes[EVALUATION] = "unchanged"
    return changes


def _automation(name: str, description: str, trigger: Any, actions: Sequence[Any]) -> AutomationCore:
    from prefect.events.schemas.automations import AutomationCore

    return AutomationCore(name=name, description=description, enabled=True, trigger=trigger, actions=list(actions))


def _trigger(alert: Alert) -> Any:
    from prefect.events.schemas.automations import EventTrigger, Posture

    return EventTrigger(
        expect=set(alert.expect),
        after=set(alert.after),
        match={"prefect.resource.id": resource("*"), **alert.labels},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive if alert.proactive else Posture.Reactive,
        threshold=alert.threshold,
        within=timedelta(seconds=alert.within_s),
    )


def _actions(alert: Alert, block: UUID) -> list[Any]:
    from prefect.events.actions import SendNotification

    return [SendNotification(block_document_id=block, subject=alert.subject, body=alert.body)]


def _told(alert: Alert, known: Automation | None) -> list[Any]:
    """Whom an alert tells today, with today's words; nobody when it is new."""
    from prefect.events.actions import DoNothing, SendNotification

    if known is None:
        return [DoNothing()]
    return [
        action.model_copy(update={"subject": alert.subject, "body": alert.body})
        if isinstance(action, SendNotification)
        else action
        for action in known.actions
    ]


def _evaluation(client: SyncPrefectClient, every: int) -> AutomationCore:
    from prefect.events.actions import RunDeployment
    from prefect.events.schemas.automations import EventTrigger, Posture
    from prefect.exceptions import ObjectNotFound

    if every not in EVERY:
        offered = ", ".join(str(n) for n in EVERY)
        raise SprawlError(f"versions are not labelled for every {every}", f"choose one of {offered}")
    try:
        deployment = client.read_deployment_by_name(EVALUATE_DEPLOYMENT)
    except ObjectNotFound:
        raise SprawlError(
            f"the server has no deployment {EVALUATE_DEPLOYMENT}", "`sprawl up` or `prefect deploy --all` registers it"
        ) from None
    trigger = EventTrigger(
        expect={VERSION_PUBLISHED},
        match={"prefect.resource.id": resource("*"), every_nth(every): "true"},
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,  # the default, but an update sends only what was set, and must say it
    )
    parameters = {
        "run_id": _rendered("event.payload.run_id"),
        "board": _rendered("event.payload.board"),
        "version": _rendered("event.payload.version"),
        "every": every,
    }
    action = RunDeployment(source="selected", deployment_id=deployment.id, parameters=parameters)
    description = f"Versions that {every} divides; one that was missed is made up for by the next."
    return _automation(EVALUATION, description, trigger, [action])


def _rendered(expression: str) -> dict[str, Any]:
    """A parameter that is taken from the event with its type: a plain template would make every value a string."""
    template = f"{{{{ {expression} | tojson }}}}"
    return {"__prefect_kind": "json", "value": {"__prefect_kind": "jinja", "template": template}}


def _block_id(client: SyncPrefectClient, notify: str) -> UUID:
    from prefect.exceptions import ObjectNotFound

    kind, _, name = notify.partition("/")
    if not kind or not name:
        raise SprawlError(f"{notify!r} names no block", "give TYPE/NAME, for example slack-webhook/team")
    try:
        return client.read_block_document_by_name(name, kind, include_secrets=False).id
    except ObjectNotFound:
        raise SprawlError(
            f"the server has no block {notify}", "create it in the UI under Blocks, or in Python"
        ) from None


def _put(client: SyncPrefectClient, known: Automation | None, wanted: AutomationCore) -> Change:
    if known is None:
        client.create_automation(wanted)
        return "created"
    if _declared(known) == _declared(wanted):
        return "unchanged"
    client.update_automation(known.id, wanted.model_copy(update={"enabled": known.enabled}))
    return "updated"


def _declared(automation: AutomationCore) -> dict[str, Any]:
    """What is ours to say about an automation; sets become lists in an order of their own, so they are sorted."""
    plain: dict[str, Any] = automation.model_dump(mode="json", include={"name", "description", "trigger", "actions"})
    trigger: dict[str, Any] = {
        key: sorted(value) if isinstance(value, list) else value for key, value in plain["trigger"].items()
    }
    trigger["match"] = {key: [value] if isinstance(value, str) else value for key, value in trigger["match"].items()}
    trigger.pop("id", None)
    return plain | {"trigger": trigger}
