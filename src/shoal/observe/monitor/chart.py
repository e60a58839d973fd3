"""A curve in characters: braille, eight dots to a character, or ASCII; with labelled axes."""

import itertools
import math
from collections.abc import Sequence

from shoal.observe.monitor.look import Look

_DECADES = 100.0
"""The largest over the smallest value from which on a scale of powers shows more."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Braille's dots by row and column."""


def is_log(name: str, values: Sequence[float]) -> bool:
    """Whether a metric spans decades."""
    return not name.endswith("accuracy") and min(values) > 0 and max(values) / min(values) >= _DECADES


def axis_label(name: str, value: float) -> str:
    """Short: at most eight characters."""
    if name.endswith("accuracy"):
        return f"{value:.1%}" if abs(value) < 0.9995 else f"{value:.0%}"
    if abs(value) >= 1e4 or 0 < abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def chart(name: str, points: Sequence[tuple[float, float]], width: int, height: int, look: Look) -> list[str]:
    """Lines of at most `width` characters: `height - 1` of the curve, and one of steps."""
    values = [value for _, value in points]
    log = is_log(name, values)
    low, high = _range([math.log10(value) for value in values] if log else values)
    rows = max(height - 1, 1)
    marks = {0: high, rows - 1: low} | (
        {rows // 2: high - (high - low) * (rows // 2) / (rows - 1)} if rows >= 5 else {}
    )
    labels = {row: axis_label(name, 10**value if log else value) for row, value in marks.items()}
    margin = max(len(label) for label in labels.values())
    inner = max(width - margin - 2, 1)
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    scaled = [
        (
            (step - first) / (last - first) if last > first else 0.5,
            ((math.log10(value) if log else value) - low) / (high - low),
        )
        for step, value in points
    ]
    drawn = _ascii(scaled, inner, rows) if look.is_plain else _braille(scaled, inner, rows)
    lines = [
        f"{labels.get(row, ''):>{margin}} {look('┤' if row in labels else '│')}{line}" for row, line in enumerate(drawn)
    ]
    begin, end = f"{round(first):,}", f"{round(last):,}"
    more = f"step {end}" + (f" {look('·')} log" if log else "")
    steps = next((f"{begin}{words:>{inner - len(begin)}}" for words in (more, end) if len(begin + words) < inner), end)
    lines.append(" " * (margin + 2) + steps[:inner])
    return lines


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low > 1e-12 * max(abs(low), abs(high), 1e-300):
        return low, high
    around = abs(high) * 0.1 or 1.0
    return low - around, high + around


def _braille(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    cells = [[0] * width for _ in range(height)]
    for x, y in _dots(points, 2 * width, 4 * height):
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells]


def _ascii(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    cells = [[" "] * width for _ in range(height)]
    for x, y in _dots(points, width, height):
        cells[y][x] = "*"
    return ["".join(row) for row in cells]


def _dots(points: Sequence[tuple[float, float]], width: int, height: int) -> set[tuple[int, int]]:
    """The dots of a line through all points, given in shares of width and height; (0, 0) is at the top left."""
    places = [(round(x * (width - 1)), round((1 - y) * (height - 1))) for x, y in points]
    found = set(places[:1])
    for (x0, y0), (x1, y1) in itertools.pairwise(places):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(1, steps + 1):
            found.add((round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)))
    return found
