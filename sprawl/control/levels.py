"""The state machine: symptoms in, what the next step does out. Pure.

| level | what a step does otherwise than configured |
|---|---|
| 0 | nothing |
| 1 | sign(M) weighs less as it ages and where it disagrees; fires are brought forward; the dense view is probed often |
| 2 | and the learning rate is multiplied by `guard` |
| 3 | and by `guard` once more; every `dense_every` steps is a dense one |
| 4 | and by `guard` once more; damage that does not improve for `stop_after` steps ends the run with a verdict |

A symptom at its limit starts level 1, one at twice its limit level 2. A level is left upwards when a symptom is still
at its limit in what was measured `patience` steps or more after it began (at twice the limit: one step after), and
downwards after `calm` steps in which every symptom was below half of its limit. In between nothing changes.
Damage is a mismatch that rises, an entropy through the codec that is lost, or a reward that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sprawl.board.records import ControlRecord
from sprawl.config_control import ControlConfig
from sprawl.control.observation import Observation
from sprawl.control.symptoms import Marks, Symptom, find_symptoms, improving, update_marks
from sprawl.control.verdict import verdict

LAST = 4
RELEASE = 0.5  # lasting severity below which a step is quiet
DAMAGE = frozenset({"mismatch", "entropy", "reward"})  # what a run is stopped for when nothing helps
SEVERE = 2.0
MAX_DOUBLINGS = 3  # of `calm`, after relapses


@dataclass(frozen=True)
class Circuit:
    """What the controller needs to know of the run around it.

    fire_every: c, None without an anchor. lag: K. last_fire: the last regular fire of the run, behind which none is
    brought forward. compressed: whether a codec stands at the boundaries.
    """

    fire_every: int | None
    lag: int
    checkpoint_every: int
    last_fire: int
    compressed: bool


def decide(
    step: int,
    previous: ControlRecord | None,
    history: Sequence[Observation],
    sign_age: int | None,
    config: ControlConfig,
    circuit: Circuit,
) -> ControlRecord:
    """What optimizer step `step` does.

    previous: the decision of step - 1, None for the first step. history: observations of the steps before, ascending,
    the newest is step - 1; at least `history_needed(config)` of them, or all there are. sign_age: of the sign map that
    the step will use, None without one.
    """
    before = previous or ControlRecord()
    marks = update_marks(Marks(before.best_reward, before.best_step, before.entropy), history)
    symptoms = find_symptoms(
        history,
        marks,
        config,
        since=before.since,
        fire_every=circuit.fire_every,
        compressed=circuit.compressed,
    )
    place = _move(
        step, _Place(before.level, before.since, before.quiet, before.eased, before.relapses), symptoms, config
    )
    level, since, acting = place.level, place.since, place.level > 0
    worst = [one for one in symptoms if one.severity >= 1]
    stopped = _stop(step, level, since, worst, history, config)
    return ControlRecord(
        level=level,
        since=since,
        quiet=place.quiet,
        eased=place.eased,
        relapses=place.relapses,
        best_reward=marks.best_reward,
        best_step=marks.best_step,
        entropy=marks.entropy,
        sign_strength=sign_strength(sign_age, history, config, circuit) if acting else 1.0,
        lr_scale=config.guard ** max(0, level - 1),
        dense=level >= 3 and config.dense_every > 0 and (step - since) % config.dense_every == 0,
        probe=acting and step % config.probe_every == 0,
        fire=_brought_forward(step, circuit) if acting and config.bring_forward else None,
        symptoms={one.kind: one.text for one in worst},
        verdict=verdict(step, since, marks, worst) if stopped else None,
    )


def history_needed(config: ControlConfig) -> int:
    """How many steps back a decision looks; far enough for two probes that are 20 steps apart."""
    return max(config.window, config.stop_after + 1, 2 * 20) + 1


@dataclass(frozen=True)
class _Place:
    """Where the state machine stands; fields as in `ControlRecord`."""

    level: int
    since: int
    quiet: int
    eased: bool
    relapses: int

    def to(self, level: int, step: int) -> _Place:
        """A move that takes a move downwards back is a relapse."""
        up = level > self.level
        return _Place(level, step, 0, not up, self.relapses + (up and self.eased))


def _move(step: int, before: _Place, symptoms: Sequence[Symptom], config: ControlConfig) -> _Place:
    worst = symptoms[0].severity if symptoms else 0.0
    if before.level == 0:
        return before if worst < 1 else before.to(2 if worst >= SEVERE else 1, step)
    pressing = any(
        (one.severity >= 1 and one.at >= before.since + config.patience)
        or (one.severity >= SEVERE and one.at > before.since)
        for one in symptoms
    )
    if pressing and before.level < LAST:
        return before.to(before.level + 1, step)
    if any(one.unrest >= RELEASE for one in symptoms):
        return replace(before, quiet=0)
    if before.quiet + 1 < config.calm * 2 ** min(before.relapses, MAX_DOUBLINGS):
        return replace(before, quiet=before.quiet + 1)
    return before.to(before.level - 1, step)


def sign_strength(age: int | None, history: Sequence[Observation], config: ControlConfig, circuit: Circuit) -> float:
    """Share of the configured weight that sign(M) keeps at its age, and at its measured agreement if there is one.

    Full up to age `fresh`, falling linearly to nothing at c. Agreement of the dense gradient with this very map,
    where a gradient probe has measured it: full from 60 % on, nothing at 50 % (chance).
    """
    if age is None or circuit.fire_every is None:
        return 1.0
    span = max(1, circuit.fire_every - config.fresh)
    strength = min(1.0, max(0.0, 1 - (age - config.fresh) / span))
    probe = next((seen for seen in reversed(history) if seen.dense_sign_agreement is not None), None)
    fire = history[-1].step + 1 - age if history else None  # of the map that the coming step uses
    if probe is not None and probe.dense_sign_agreement is not None and probe.sign_fire == fire:
        strength *= min(1.0, max(0.0, (probe.dense_sign_agreement - 0.5) / 0.1))
    return max(config.sign_floor, strength)


def _brought_forward(step: int, circuit: Circuit) -> int | None:
    """The next step at or after `step` where a fire can be had between the regular ones, None when there is none.

    A fire reads checkpoints K steps back and further, so it happens at their distance and not before K. None is asked
    for behind the last regular one, where the anchor ends.
    """
    if circuit.fire_every is None:
        return None
    fire = -(-step // circuit.checkpoint_every) * circuit.checkpoint_every
    return fire if fire % circuit.fire_every and circuit.lag <= fire < circuit.last_fire else None


def _stop(
    step: int, level: int, since: int, worst: Sequence[Symptom], history: Sequence[Observation], config: ControlConfig
) -> bool:
    if level < LAST or not config.stop_after or step - since < config.stop_after:
        return False
    return any(one.kind in DAMAGE for one in worst) and not improving(history, since)
