"""Keyed draws: operands as pure functions of a key, and a split into training and held-out pairs.

Cryptographic hashing rather than `random`: the same on every platform, Python release and PYTHONHASHSEED.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

COMMUTATIVE = {"+", "*"}


@dataclass(frozen=True)
class Operation:
    """`left op right` on non-negative integers."""

    left: int
    op: str
    right: int

    @property
    def result(self) -> int:
        if self.op == "+":
            return self.left + self.right
        if self.op == "-":
            return self.left - self.right
        return self.left * self.right


def keyed_integer(bound: int, *key: str | int) -> int:
    """An integer in [0, bound), uniform over keys (bias below bound / 2**128)."""
    digest = hashlib.blake2b("\x1f".join(str(part) for part in key).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big") % bound


@dataclass(frozen=True)
class Operations:
    """All `left op right` with operands of at most `digits` digits; a share of them is held out.

    The split is by hash of the operation alone. Commuted pairs fall on the same side, so that `4+3` in training
    does not give away a held-out `3+4`.
    """

    name: str  # separates the splits and draws of different problem sets
    digits: int
    operators: str
    heldout_share: float

    @property
    def size(self) -> int:
        return 10 ** (2 * self.digits) * len(self.operators)

    def at(self, index: int) -> Operation:
        """The operation with number `index` in [0, size)."""
        pairs, bound = 10 ** (2 * self.digits), 10**self.digits
        pair = index % pairs
        return Operation(pair // bound, self.operators[index // pairs], pair % bound)

    def is_heldout(self, operation: Operation) -> bool:
        left, right = operation.left, operation.right
        if operation.op in COMMUTATIVE:
            left, right = sorted((left, right))
        return keyed_integer(2**64, self.name, "split", left, operation.op, right) < self.heldout_share * 2**64

    def draw(self, *key: str | int) -> Operation:
        """A training operation, uniform, a function of `key` only."""
        attempt = 0
        while self.is_heldout(operation := self.at(keyed_integer(self.size, self.name, "draw", *key, attempt))):
            attempt += 1
        return operation

    def heldout(self) -> Iterator[Operation]:
        """Every held-out operation once, in a fixed scattered order."""
        stride = keyed_integer(self.size, self.name, "order")
        while math.gcd(stride, self.size) != 1:
            stride += 1
        for index in range(self.size):
            operation = self.at(index * stride % self.size)
            if self.is_heldout(operation):
                yield operation
