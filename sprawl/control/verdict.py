"""The sentence a run ends with when the controller gives it up: what was seen, and what to try. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sprawl.control.symptoms import Marks, Symptom

_REMEDIES: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"speed", "kl", "reward"}), "lower optimizer.lr"),
    (frozenset({"sign", "stale"}), "lower anchor.every and anchor.lag, or raise anchor.blend"),
    (
        frozenset({"mismatch", "entropy"}),
        "choose a boundary.codec without a fixed direction (prf), or raise boundary.ratio",
    ),
)


def verdict(step: int, since: int, marks: Marks, symptoms: Sequence[Symptom]) -> str:
    """What was seen, in one line; `remedy` is the other half."""
    best = ""
    if marks.best_reward is not None:
        best = f"; the best mean reward, {marks.best_reward:.3g}, was that of version {marks.best_step}"
    seen = " and ".join(symptom.text for symptom in symptoms)
    return f"stopped before step {step}: every measure has been in force since step {since}, yet {seen}{best}"


def remedy(kinds: Collection[str]) -> str:
    """What to change in the next run, by the kinds of the symptoms."""
    return "; ".join(text for group, text in _REMEDIES if group & set(kinds)) or "lower optimizer.lr"
