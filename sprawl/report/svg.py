"""Small line charts as SVG text: for pages that are drawn every few seconds while a run trains.

A chart costs a millisecond and a few kilobytes, where the same figure by matplotlib takes a good part of a second of
the trainer's own process. Long series are thinned to `MAX_POINTS` means, so the size does not grow with the run.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape

from sprawl.report.style import GRID, INK, MUTED, spread
from sprawl.report.text import number

MAX_POINTS = 200
WIDTH, HEIGHT = 430, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 104, 36, 28
_FONT = "font-family='Helvetica,Arial,sans-serif'"


@dataclass(frozen=True)
class Series:
    """`points` are (step, value), ascending by step; values that are not finite are left out."""

    label: str
    colour: str
    points: Sequence[tuple[int, float]]
    kind: Literal["line", "dots", "marks"] = "line"  # dots: faint raw values; marks: few, each worth seeing


def thin(points: Sequence[tuple[int, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most `limit` points, each the mean of as many neighbours; a short series as it is."""
    size = -(-len(points) // limit)
    if size <= 1:
        return [(float(x), y) for x, y in points]
    chunks = (points[at : at + size] for at in range(0, len(points), size))
    return [(sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers in [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high]; with 2 and 5 times them where there are fewer than three."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tens = [10.0**exponent for exponent in decades]
    fine = [factor * ten for ten in tens for factor in (1, 2, 5)]
    inside = [value for value in tens if low <= value <= high]
    return inside if len(inside) >= 3 else [value for value in fine if low <= value <= high] or [low]


def chart(
    title: str,
    series: Sequence[Series],
    *,
    log: bool = False,
    floor: float | None = 0.0,
    ceiling: float | None = None,
    text: Callable[[float], str] = number,
) -> str:
    """One chart as a complete SVG document, white, `WIDTH` x `HEIGHT`.

    floor, ceiling: values the vertical axis reaches at least (a linear one only); `text` writes its numbers. Each
    series is named at its right end. A chart without a single finite value says so.
    """
    kept = [_clean(entry, log) for entry in series]
    kept = [entry for entry in kept if entry.points]
    body = [
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        f"<text x='8' y='18' {_FONT} font-size='14.5' font-weight='bold' fill='{INK}'>{escape(title)}</text>",
    ]
    if kept:
        body += _plot(kept, log, floor, ceiling, text)
    else:
        body.append(f"<text x='8' y='60' {_FONT} font-size='12' fill='{MUTED}'>nothing measured yet</text>")
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}'>"
    return head + "".join(body) + "</svg>"


def data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _clean(series: Series, log: bool) -> Series:
    usable = [(x, y) for x, y in series.points if math.isfinite(y) and (y > 0 or not log)]
    return Series(series.label, series.colour, usable, series.kind)


def _plot(
    series: Sequence[Series], log: bool, floor: float | None, ceiling: float | None, text: Callable[[float], str]
) -> list[str]:
    xs = [x for entry in series for x, _ in entry.points]
    low, high = _range([y for entry in series for _, y in entry.points], log, floor, ceiling)
    first, last = min(xs), max(xs)
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    scale = math.log10 if log else float
    span = (scale(high) - scale(low)) or 1.0

    def at_x(x: float) -> float:
        return _LEFT + (right - _LEFT) * ((x - first) / (last - first) if last > first else 0.5)

    def at_y(y: float) -> float:
        return bottom - (bottom - _TOP) * (scale(y) - scale(low)) / span

    parts = []
    for value in log_ticks(low, high) if log else ticks(low, high):
        y = at_y(value)
        parts.append(f"<path d='M{_LEFT} {y:.1f}H{right}' stroke='{GRID}'/>")
        parts.append(_label(_LEFT - 6, y + 4, text(value), MUTED, "end", 11.5))
    steps = {first, last, *(int(x) for x in ticks(first, last) if x == int(x))}
    near = 30 / max(1, right - _LEFT) * (last - first)  # a tick this close to an end would run into its number
    for x in sorted(x for x in steps if x in (first, last) or first + near < x < last - near):
        parts.append(_label(at_x(x), bottom + 15, str(x), MUTED, "middle", 11.5))
    parts.append(f"<path d='M{_LEFT} {bottom}H{right}' stroke='{MUTED}'/>")
    for entry in series:
        parts.append(_draw(entry, at_x, at_y))
    named = [entry for entry in series if entry.label]
    parts += _names(named, [at_y(thin(entry.points)[-1][1]) for entry in named], bottom)
    return parts


def _range(values: Sequence[float], log: bool, floor: float | None, ceiling: float | None) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        return (low / 1.25, high * 1.25)
    low = low if floor is None else min(low, floor)
    high = high if ceiling is None else max(high, ceiling)
    if high == low:
        return low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    return low, high + (0.0 if ceiling is not None and high == ceiling else 0.06 * (high - low))


def _draw(series: Series, at_x: Callable[[float], float], at_y: Callable[[float], float]) -> str:
    points = [(at_x(x), at_y(y)) for x, y in thin(series.points)]
    if series.kind == "line" and len(points) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        return f"<polyline points='{path}' fill='none' stroke='{series.colour}' stroke-width='1.8'/>"
    width, opacity = (3.2, 0.45) if series.kind == "dots" else (6.0, 1.0)
    path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)  # a line of no length with a round cap is a dot
    style = f"stroke='{series.colour}' stroke-width='{width}' stroke-linecap='round' stroke-opacity='{opacity}'"
    return f"<path d='{path}' {style}/>"


def _names(series: Sequence[Series], heights: Sequence[float], bottom: float) -> list[str]:
    """Labels at the right, in the order of their heights, moved apart where they would overlap."""
    extent = bottom - _TOP
    order = sorted(range(len(series)), key=lambda index: -heights[index])
    centres = spread([(bottom - heights[index]) / extent for index in order], [15 / extent] * len(order))
    return [
        _label(
            WIDTH - _RIGHT + 6, bottom - centre * extent + 3.5, series[index].label, series[index].colour, "start", 11
        )
        for index, centre in zip(order, centres, strict=True)
    ]


def _label(x: float, y: float, words: str, colour: str, anchor: str, size: float) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {_FONT} font-size='{size}' fill='{colour}' text-anchor='{anchor}'>"
        f"{escape(words)}</text>"
    )
