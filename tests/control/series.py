"""Observations of runs that behave in one way, and the controller played over them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from sprawl.board.records import ControlRecord
from sprawl.config_control import ControlConfig
from sprawl.control.levels import Circuit, decide
from sprawl.control.observation import Observation

CIRCUIT = Circuit(fire_every=20, lag=20, checkpoint_every=10, last_fire=400, compressed=True)
ON = ControlConfig(enabled=True)


def seen(step: int, noise: random.Random, **changes: Any) -> Observation:
    """A quiet compressed step: the levels and the noise of the tiny run."""
    probe = step % 5 == 0
    fields: dict[str, Any] = {
        "step": step,
        "reward": 0.6 + noise.gauss(0, 0.04),
        "mismatch": 4.3 + noise.gauss(0, 0.08),
        "entropy": 1.85 + noise.gauss(0, 0.02),
        "mismatch_dense": 0.003 + noise.random() * 0.002 if probe else None,
        "kl_dense": 0.001 * step if probe else None,
        "staleness": 1.0,
        "sign_fire": (step - 1) // 20 * 20 or None,
        "sign_age": (step - 1) % 20 + 1 if step > 20 else None,
        "dense_sign_agreement": None,
    }
    return Observation(**(fields | changes))


Changes = Callable[[int, ControlRecord], dict[str, Any]]


def play(
    steps: int, changes: Changes = lambda step, control: {}, config: ControlConfig = ON, seed: int = 1
) -> list[ControlRecord]:
    """The decisions of `steps` steps; `changes(step, what the step does)` says how its observation is out of the
    ordinary. Ends early with a verdict."""
    noise, history = random.Random(seed), []
    decisions: list[ControlRecord] = []
    for step in range(1, steps + 1):
        age = (step - 1) % 20 + 1 if step > 20 else None
        decisions.append(decide(step, decisions[-1] if decisions else None, history, age, config, CIRCUIT))
        if decisions[-1].verdict is not None:
            break
        history.append(seen(step, noise, **changes(step, decisions[-1])))
    return decisions


def levels(decisions: list[ControlRecord]) -> list[int]:
    """The levels in the order they were in force, repeats left out."""
    found = [decisions[0].level]
    for decision in decisions:
        if decision.level != found[-1]:
            found.append(decision.level)
    return found
