"""The tables of a study, as markdown: an arm a line, means over the seeds with their range."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sprawl.report.text import DASH, number, percent, signed
from sprawl.study.measures import COLLAPSE_RULE, ArmRuns, Spread, arm_measures
from sprawl.study.staleness import WINDOW, Milestones, staleness_measures

Format = Callable[[float | None], str]
_ARMS_NOTE = (
    "Means over the seeds, their range in brackets. Entropy and KL: last 20 steps; the entropy is read through the "
    f"codec, the KL without it. {COLLAPSE_RULE[0].upper()}{COLLAPSE_RULE[1:]}."
)
_STALENESS_NOTE = (
    f"Rewards are means of {WINDOW} steps. Seconds are those of the steps, without evaluations, or "
    "of each arm's short run alone where the study has `timing`. `cut`: share of tokens "
    f"whose off-policy weight was truncated. {COLLAPSE_RULE[0].upper()}{COLLAPSE_RULE[1:]}."
)


def cell(spread: Spread, text: Format = number, *, share: bool = True) -> str:
    """`0.651 (0.62–0.68)`; a single value stands alone. `share`: says how many seeds have a value, if not all do."""
    known = spread.known
    if not known:
        return DASH
    shown = text(spread.mean)
    if len(known) > 1:
        low, high = text(min(known)), text(max(known))
        shown += "" if low == high else f" ({low}–{high})"
    missing = share and len(known) < len(spread.values)
    return f"{shown}, {len(known)} of {len(spread.values)}" if missing else shown


def arms_table(arms: Sequence[ArmRuns]) -> str:
    """One line an arm: how it learned, what the mismatch did, what it sent."""
    heads = (
        "arm",
        "seeds",
        "steps",
        "reward, first 10 → last 20",
        "greedy accuracy",
        "mismatch, nats/token",
        "its slope / 100 steps",
        "entropy, codec",
        "KL, dense",
        "gradient norm",
        "boundary bytes / dense",
        "sign agreement",
        "s/step",
        "collapsed",
        "violations",
    )
    rows = []
    for runs in arms:
        of = arm_measures(runs)
        rows.append(
            (
                runs.label,
                _seeds(runs),
                str(runs.steps),
                f"{number(of['reward_first10'].mean)} → {cell(of['reward_last20'])}",
                cell(of["greedy_accuracy"]),
                cell(of["mismatch"]),
                cell(of["mismatch_slope"], _per_hundred),
                cell(of["entropy_compression"]),
                cell(of["kl_dense"]),
                cell(of["grad_norm"]),
                cell(of["boundary_bytes_ratio"], percent),
                cell(of["sign_agreement"]),
                cell(of["seconds_per_step"]),
                collapsed(runs),
                str(len(violations(runs))),
            )
        )
    return f"{_markdown(heads, rows)}\n{_ARMS_NOTE}\n"


def staleness_table(arms: Sequence[ArmRuns], at: Milestones) -> str:
    """One line an arm: reward by steps and by seconds."""
    heads = (
        "arm",
        "seeds",
        "staleness, measured",
        *(f"reward at step {step}" for step in at.steps),
        "greedy accuracy",
        *(f"reward after {number(seconds)} s" for seconds in at.seconds),
        *(f"seconds (steps) to {reward:g}" for reward in at.rewards),
        "cut",
        "s/step",
        "collapsed",
    )
    rows = []
    for runs in arms:
        of, general = staleness_measures(runs, at), arm_measures(runs)
        rows.append(
            (
                runs.label,
                _seeds(runs),
                number(of["staleness"].mean),
                *(cell(of[f"reward_at_{step}"]) for step in at.steps),
                cell(general["greedy_accuracy"]),
                *(cell(of[f"reward_after_{seconds:.0f}s"]) for seconds in at.seconds),
                *(_time_to(of, reward) for reward in at.rewards),
                percent(of["off_policy_cut"].mean),
                cell(general["seconds_per_step"]),
                collapsed(runs),
            )
        )
    return f"{_markdown(heads, rows)}\n{_STALENESS_NOTE}\n"


def collapsed(runs: ArmRuns) -> str:
    """`no`, `yes, step 143`, `2 of 3, steps 143–171`; what is not finished is said."""
    verdicts = list(runs.verdicts().values())
    bad = [entry.step for entry in verdicts if entry.kind in ("collapsed", "stopped") and entry.step is not None]
    unfinished = sum(entry.kind == "unfinished" for entry in verdicts)
    if not verdicts:
        return DASH
    if not bad:
        text = "no"
    else:
        where = f"step {bad[0]}" if min(bad) == max(bad) else f"steps {min(bad)}–{max(bad)}"
        text = f"{'yes' if len(bad) == len(verdicts) else f'{len(bad)} of {len(verdicts)}'}, {where}"
    return f"{text}; {unfinished} unfinished" if unfinished else text


def violations(runs: ArmRuns) -> list[str]:
    """Of the whole runs, each with its run id."""
    from sprawl.report.violations import find_violations

    return [f"{data.run.run_id}: {violation}" for data in runs.runs for violation in find_violations(data)]


def _seeds(runs: ArmRuns) -> str:
    return str(len(runs.complete))


def _time_to(of: Mapping[str, Spread], reward: float) -> str:
    seconds, steps = of[f"seconds_to_{reward:g}"], of[f"steps_to_{reward:g}"]
    return f"{cell(seconds)} ({number(steps.mean)})" if seconds.known else DASH


def _per_hundred(slope: float | None) -> str:
    return DASH if slope is None else signed(100 * slope)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
