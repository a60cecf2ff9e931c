"""How small and how fast deltas are, against the entropy bound and against what other systems send.

    python -m benchmarks.delta                           every case, 1 GiB of bf16 for each synthetic one
    python -m benchmarks.delta --quick                   64 MiB each, under a minute
    python -m benchmarks.delta --board runs --run ID     the last versions of a run of your own as well

Sizes are exact. Times are the smallest of several interleaved rounds, CPU seconds of the one thread that does the
work, so that other load on the machine disturbs ratios little; `threads` is wall time. `encode` is states to blob;
`apply` is blob to patched and verified state: decode, write in place, and blake3 of every changed tensor, the same
for everyone (ours checks the digest of the blob as well). `entropy` is the conditional entropy of the new value
given the class of the old one: its exponent, or its code where four-bit codes are packed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.command import run
from benchmarks.peers import PEERS
from benchmarks.versions import Pair, adam_state, from_board, from_tiny_steps
from sprawl.delta.bits import BITS, integer_view
from sprawl.delta.codec import apply, decode, encode
from sprawl.delta.state import State, clone_state, state_bytes, tensor_digest
from sprawl.errors import SprawlError

SHARES = (0.0005, 0.0025, 0.01, 0.03)


@dataclass(frozen=True)
class Case:
    name: str
    pairs: Callable[[], Iterable[Pair]]


@dataclass
class Tally:
    """Sums over the pairs of a case: bytes and seconds by what was done, and what the entropy needs."""

    bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    steps: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)
    classes: dict[tuple[str, int], int] = field(default_factory=dict)
    state_bytes: int = 0
    elements: int = 0
    changed: int = 0
    peak: int = 0

    def add(self, what: str, seconds: float, size: int = 0) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds
        self.bytes[what] = self.bytes.get(what, 0) + size


def _codes(name: str, tensor: torch.Tensor) -> tuple[str, np.ndarray, np.ndarray]:
    """Alphabet, ordered integers and class of every element, as the bound sees them."""
    words = integer_view(tensor)
    if name.endswith("_packed"):
        codes = np.stack((words & 15, words >> 4), 1).reshape(-1)
        return "nibbles", codes, codes
    bits = BITS[tensor.dtype]
    classes = (words >> words.dtype.type(bits.shift)) & words.dtype.type(bits.mask)
    if bits.sign:
        words = np.where(words & bits.sign, ~words, words | words.dtype.type(bits.sign))
    return str(tensor.dtype), words, classes


def count_steps(tally: Tally, old: State, new: State) -> None:
    """Add what changed, by class of the old value, to the tally."""
    for name in new:
        alphabet, before, classes = _codes(name, old[name])
        _, after, _ = _codes(name, new[name])
        places = np.flatnonzero(before != after)
        for class_, number in enumerate(np.bincount(classes)):
            if number:
                key = (alphabet, class_)
                tally.classes[key] = tally.classes.get(key, 0) + int(number)
        steps = after[places].astype(np.int64) - before[places].astype(np.int64)
        pairs, counts = np.unique(np.stack((classes[places].astype(np.int64), steps)), axis=1, return_counts=True)
        for (class_, step), number in zip(pairs.T.tolist(), counts.tolist(), strict=True):
            into = tally.steps.setdefault((alphabet, class_), {})
            into[step] = into.get(step, 0) + number
        tally.elements += before.size
        tally.changed += places.size


def entropy_bytes(tally: Tally) -> float:
    """Bytes below which no coder that knows only the class of each old value can stay on average."""
    bits = 0.0
    for key, total in tally.classes.items():
        counts = np.array([total - sum(tally.steps.get(key, {}).values()), *tally.steps.get(key, {}).values()])
        counts = counts[counts > 0]
        bits -= float((counts * np.log2(counts / total)).sum())
    return bits / 8


def _high_water() -> int | None:
    """The most resident memory since `_reset_high_water`, bytes; None where the kernel does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None


def peak_extra(work: Callable[[], Any]) -> int:
    """Bytes of memory that `work` needs at once, in a fresh thread (its scratch counts); 0 where unknown."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from what is resident now
    except OSError:
        return 0
    before = _high_water()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    after = _high_water()
    return 0 if before is None or after is None else max(0, after - before)


def _best(rounds: int, jobs: dict[str, Callable[[], Any]], prepare: Callable[[], None]) -> dict[str, float]:
    """Smallest CPU seconds of each job over interleaved rounds; `prepare` runs before each, untimed."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, job in jobs.items():
            prepare()
            started = time.thread_time()
            job()
            best[name] = min(best[name], time.thread_time() - started)
    return best


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    tally = Tally()
    for old, new in case.pairs():
        count_steps(tally, old, new)
        _measure_pair(tally, old, new, rounds)
    return _row(case.name, tally)


def _measure_pair(tally: Tally, old: State, new: State, rounds: int) -> None:
    blob = encode(old, new).blob
    changed = [name for name in new if not torch.equal(_raw(old[name]), _raw(new[name]))]
    expected = {name: tensor_digest(new[name]) for name in changed}
    target = clone_state(old)
    peers = {p.name: {n: p.encode(integer_view(old[n]), integer_view(new[n])) for n in new} for p in PEERS}

    def restore() -> None:
        for name in changed:
            target[name].copy_(old[name])

    def verify() -> None:
        for name in changed:
            if tensor_digest(target[name]) != expected[name]:
                raise SprawlError(f"{name} is not what was sent", "this is a bug: report it")

    def apply_ours() -> None:
        apply(target, decode(target, blob))
        verify()

    tally.peak = max(tally.peak, peak_extra(lambda: encode(old, new)), peak_extra(lambda: decode(old, blob)))
    jobs: dict[str, Callable[[], Any]] = {"encode": lambda: encode(old, new), "apply": apply_ours}
    for peer in PEERS:
        jobs[f"encode {peer.name}"] = lambda peer=peer: [
            peer.encode(integer_view(old[name]), integer_view(new[name])) for name in new
        ]

        def apply_peer(peer: Any = peer) -> None:
            for name in changed:
                peer.apply(integer_view(target[name]), peers[peer.name][name])
            verify()

        jobs[f"apply {peer.name}"] = apply_peer
    jobs["compare"] = lambda: [np.array_equal(integer_view(old[n]), integer_view(new[n])) for n in new]
    jobs["memcpy"] = lambda: [np.copyto(integer_view(target[n]), integer_view(new[n])) for n in new]
    for name, seconds in _best(rounds, jobs, restore).items():
        tally.add(name, seconds)
    for threads in (1, 2):
        started = time.perf_counter()
        encode(old, new, threads=threads)
        tally.add(f"wall {threads}", time.perf_counter() - started)
    tally.add("encode", 0.0, len(blob))
    for peer in PEERS:
        tally.add(f"encode {peer.name}", 0.0, sum(len(data) for data in peers[peer.name].values()))
    tally.state_bytes += state_bytes(new)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _row(name: str, tally: Tally) -> dict[str, Any]:
    entropy = entropy_bytes(tally)
    peers = {peer.name: tally.bytes[f"encode {peer.name}"] for peer in PEERS}
    seconds, ours = tally.seconds, tally.bytes["encode"]
    return {
        "case": name,
        "state_bytes": tally.state_bytes,
        "changed_share": tally.changed / tally.elements,
        "bytes": ours,
        "entropy_bytes": round(entropy),
        "peer_bytes": peers,
        "size_over_entropy": ours / entropy,
        "size_over_best_peer": ours / min(peers.values()),
        "encode_speedup": seconds["encode xor"] / seconds["encode"],
        "apply_speedup": seconds["apply xor"] / seconds["apply"],
        "encode_speedup_of": {peer.name: seconds[f"encode {peer.name}"] / seconds["encode"] for peer in PEERS},
        "apply_speedup_of": {peer.name: seconds[f"apply {peer.name}"] / seconds["apply"] for peer in PEERS},
        "encode_over_compare": seconds["encode"] / seconds["compare"],
        "encode_over_memcpy": seconds["encode"] / seconds["memcpy"],
        "apply_over_memcpy": seconds["apply"] / seconds["memcpy"],
        "encode_gb_per_s": tally.state_bytes / seconds["encode"] / 1e9,
        "apply_gb_per_s": tally.state_bytes / seconds["apply"] / 1e9,
        "two_threads": seconds["wall 1"] / seconds["wall 2"],
        "peak_extra_bytes": tally.peak,
    }


def cases(quick: bool, board: str | None, run_id: str | None) -> list[Case]:
    elements, group = (1 << 25, 1 << 25) if quick else (1 << 29, 1 << 26)
    found = []
    if board and run_id:
        found.append(Case(f"run {run_id}", lambda: from_board(board, run_id, 2 if quick else 8)))
    found.append(Case("tiny, policy-gradient steps", lambda: from_tiny_steps(8, 2 if quick else 8)))
    for share in SHARES:
        found.append(Case(f"Adam, bf16, {share:.2%}", lambda share=share: [adam_state(share, elements, group, "bf16")]))
    for view in ("fp8", "nvfp4"):
        for share in (0.01, 0.03):
            found.append(
                Case(
                    f"Adam, {view} ({share:.0%} in bf16)",
                    lambda view=view, share=share: [adam_state(share, elements // 2, group // 2, view)],
                )
            )
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """Two tables: sizes, and times as ratios."""
    lines = [
        "| case | changed | bytes | x entropy | x best peer | xor | overwrite | coo |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peers = " | ".join(f"{row['peer_bytes'][peer.name]:,}" for peer in PEERS)
        lines.append(
            f"| {row['case']} | {row['changed_share']:.3%} | {row['bytes']:,} | {row['size_over_entropy']:.3f} | "
            f"{row['size_over_best_peer']:.3f} | {peers} |"
        )
    lines += [
        "",
        "| case | encode: x xor / overwrite / coo | apply: x xor / overwrite / coo | encode / compare "
        "| encode / memcpy | apply / memcpy | 2 threads | peak extra |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        speeds = [" / ".join(f"{row[key][peer.name]:.2f}" for peer in PEERS) for key in SPEEDS]
        lines.append(
            f"| {row['case']} | {' | '.join(speeds)} | {row['encode_over_compare']:.2f} | "
            f"{row['encode_over_memcpy']:.2f} | {row['apply_over_memcpy']:.2f} | {row['two_threads']:.2f} | "
            f"{row['peak_extra_bytes'] / 2**20:.0f} MiB |"
        )
    return "\n".join(lines)


SPEEDS = ("encode_speedup_of", "apply_speedup_of")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Small states, few rounds: under a minute.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list and nothing else on stdout.")
@click.option("--board", envvar="SPRAWL_BOARD", help="Board of a run to measure as well (with --run).")
@click.option("--run", "run_id", help="Its id.")
@click.option("--only", help="Only cases whose name contains this.")
def delta(quick: bool, as_json: bool, board: str | None, run_id: str | None, only: str | None) -> None:
    """Size and speed of deltas, as ratios."""
    torch.set_num_threads(1)
    rows = []
    for case in cases(quick, board, run_id):
        if only is None or only in case.name:
            click.echo(f"{case.name} ...", err=True)
            rows.append(measure(case, 3 if quick else 5))
    click.echo(json.dumps(rows) if as_json else markdown(rows))


if __name__ == "__main__":
    run(delta)
