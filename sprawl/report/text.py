"""How numbers are written for people. A dash stands for what is not known."""

from __future__ import annotations

from datetime import UTC, datetime

DASH = "–"
_NBSP = "\u00a0"  # keeps a number and its unit on one line


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, no exponent for everyday sizes: 0.612, 4.31, 38.2, 1240."""
    if value is None:
        return DASH
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{max(1, digits - 1)}g}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text else f"{value:.{digits}f}"


def signed(value: float) -> str:
    """Two significant digits with the sign: slopes."""
    return f"{value:+.2g}".replace("-", "\u2212", 1)


def percent(share: float | None) -> str:
    return DASH if share is None else f"{number(100 * share)}{_NBSP}%"


def megabytes(count: float) -> str:
    """1.23 MB; kB and GB where those read better. Decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{number(count / size)}{_NBSP}{unit}"
    return f"{count:.0f}{_NBSP}B"


def duration(seconds: float | None) -> str:
    """42 s, 7 min 05 s, 3 h 12 min."""
    if seconds is None:
        return DASH
    if seconds < 100:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def moment(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
