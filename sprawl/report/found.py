"""What a check of the ledger finds, and how it says so."""

from __future__ import annotations

from collections.abc import Iterable

Found = list[str] | None
"""Violations, one line each; None: the run gives the check nothing to test."""


def numbers(values: Iterable[int], limit: int = 8) -> str:
    """`3, 5, 9` or `3, 5, ... (42 in all)`."""
    values = list(values)
    shown = ", ".join(str(value) for value in values[:limit])
    return shown if len(values) <= limit else f"{shown}, ... ({len(values)} in all)"
