"""Falsifiers of the anchor circuit: how often it fired, what it saw, that it trained nothing, and what it sent."""

from __future__ import annotations

from collections import Counter

from sprawl.report.data import RunData
from sprawl.report.found import Found, numbers


def fires_counted(data: RunData, finished: bool) -> Found:
    """Fires that a controller brought forward are extra: they replace no scheduled one and are counted apart.

    `finished`: whether all fires must be there by now.
    """
    if not data.setting("anchor.enabled", False):
        return [f"{len(data.fires)} anchor fires although anchor.enabled is false"] if data.fires else None
    every = data.setting("anchor.every")
    scheduled = [record.step for record in data.fires if record.kind == "scheduled"]
    found = []
    if uneven := [step for step in scheduled if step % every]:
        found.append(f"fires at steps that are no multiple of c={every}: {numbers(uneven)}")
    if repeated := [step for step, count in Counter(record.step for record in data.fires).items() if count > 1]:
        found.append(f"fires recorded more than once: {numbers(repeated)}")
    expected = data.last_step // every
    # A run under way may still wait for its newest fire, but can never be ahead of its steps.
    if len(scheduled) > expected or (finished and len(scheduled) != expected):
        extra = len(data.fires) - len(scheduled)
        apart = f" (and {extra} extra)" if extra else ""
        found.append(f"{len(scheduled)} fires{apart}, expected floor({data.last_step}/{every}) = {expected}")
    return found + _brought_forward(data, every)


def _brought_forward(data: RunData, every: int) -> list[str]:
    """Extra fires are the drift controller's, and a step asked for each."""
    extra = [record.step for record in data.fires if record.kind == "extra"]
    found = []
    if extra and not data.setting("control.enabled", False):
        found.append(f"fires between the regular ones although control.enabled is false: {numbers(extra)}")
    if regular := [step for step in extra if step % every == 0]:
        found.append(f"regular fires recorded as brought forward: {numbers(regular)}")
    # A killed run may have asked in a step that was never committed; its request stands all the same.
    asked = {record.control.fire for record in data.steps if record.control is not None}
    resumed = any(event.kind == "resume" for event in data.events)
    if not resumed and (unasked := [step for step in extra if step not in asked and step <= data.last_step]):
        found.append(f"fires brought forward that no step asked for: {numbers(unasked)}")
    return found


def anchor_lag(data: RunData) -> Found:
    """The base model counts as old enough: everybody has it from the start."""
    lag = data.setting("anchor.lag")
    if not data.fires or lag is None:
        return None
    found = []
    for record in data.fires:
        newest = max([record.newest_step, *record.checkpoints])
        if newest > max(0, record.step - lag):
            found.append(
                f"fire at step {record.step} used weights of step {newest}, newer than {record.step - lag} (t-K)"
            )
        if data.setting("anchor.replay") == "matching" and record.replayed_versions not in (None, [newest, newest]):
            found.append(
                f"fire at step {record.step} replayed rollouts of versions {record.replayed_versions}, not of the "
                f"weights it held ({newest})"
            )
    return found


def anchor_never_steps(data: RunData) -> Found:
    if not data.fires:
        return None
    stepped = [
        f"fire at step {record.step} stepped an optimizer {record.optimizer_steps} times"
        for record in data.fires
        if record.optimizer_steps != 0
    ]
    changed = [record.step for record in data.fires if record.weights_before != record.weights_after]
    return stepped + ([f"fires whose replay changed the weights it ran at: {numbers(changed)}"] if changed else [])


def sign_map_size(data: RunData) -> Found:
    """What the anchor returned is one bit a parameter of the run and the header; a step that received a map received
    exactly that."""
    if not data.fires:
        return None
    found = []
    for record in data.fires:
        expected = -(-record.parameters // 8) + record.header_bytes
        if record.bytes != expected:
            found.append(
                f"sign map of step {record.step} has {record.bytes} bytes, expected {expected}"
                f" (one bit for each of {record.parameters} parameters + {record.header_bytes} header bytes)"
            )
        if record.parameters != data.run.parameters:
            found.append(
                f"sign map of step {record.step} is of {record.parameters} parameters, the run has "
                f"{data.run.parameters}"
            )
    sizes = {record.step: record.bytes for record in data.fires}
    wrong = [
        record.step
        for record in data.steps
        if record.sign.sent and record.sign_fire is not None and record.sign.sent != sizes.get(record.sign_fire)
    ]
    return found + ([f"steps that received another sign map than their fire sent: {numbers(wrong)}"] if wrong else [])


def sign_ages(data: RunData) -> Found:
    """A step uses a fire before it and knows how old that is; ages of the weights follow from the fire's record. In
    blocking mode no step after a due fire goes without it."""
    if not data.setting("anchor.enabled", False) or not data.steps:
        return None
    newest = {record.step: record.newest_step for record in data.fires}
    unknown, wrong, late = [], [], []
    for record in data.steps:
        fire = record.sign_fire
        if fire is not None:
            if fire not in newest:
                unknown.append(record.step)
            elif (
                fire >= record.step
                or record.sign_age != record.step - fire
                or record.sign_weights_age not in (None, record.step - newest[fire])
            ):
                wrong.append(record.step)
        due = (record.step - 1) // data.setting("anchor.every") * data.setting("anchor.every")
        if data.setting("anchor.blocking", False) and due > (fire or 0):
            late.append(record.step)
    return [
        f"{what}: {numbers(steps)}"
        for what, steps in (
            ("steps corrected by a fire that is not on the ledger", unknown),
            ("steps that record a wrong age of their sign map", wrong),
            ("steps that went on without the due fire although anchor.blocking is true", late),
        )
        if steps
    ]
