"""Lines of metrics.jsonl and workers.jsonl as values over steps. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

_ALSO_MAX = ("memory_bytes", "host_memory_used", "gpu_memory_bytes", "gpu_memory_used", "gpu_celsius")
"""What runs out on one worker first."""


class Point(NamedTuple):
    """A value of a metric at a step."""

    name: str
    value: float
    step: int
    time: float
    """Unix seconds."""


def points_of_report(record: Mapping[str, Any], otherwise: float) -> Iterator[Point]:
    """A line of metrics.jsonl: metrics by their own names, seconds by phase as seconds/PHASE.

    Args:
        record: The line, which may be anything.
        otherwise: The time, where an early version has not written it down.
    """
    if (step := _step(record)) is None:
        return
    when = _time(record, otherwise)
    for name, value in _items(record.get("metrics")):
        if _is_value(value):
            yield Point(name, float(value), step, when)
    for name, value in _items(record.get("seconds")):
        if _is_value(value):
            yield Point(f"seconds/{name}", float(value), step, when)


def points_of_workers(record: Mapping[str, Any], otherwise: float) -> Iterator[Point]:
    """A line of workers.jsonl: what workers use of their machines, as the mean over those that know."""
    if (step := _step(record)) is None:
        return
    when = _time(record, otherwise)
    for name, by_rank in _items(record.get("system")):
        values = [float(value) for value in by_rank if _is_value(value)] if isinstance(by_rank, list) else []
        if values:
            yield Point(f"system/{name}", sum(values) / len(values), step, when)
            if name in _ALSO_MAX and len(values) > 1:
                yield Point(f"system/{name}_max", max(values), step, when)


def unsent(points: Iterable[Point], last: Mapping[str, int]) -> list[Point]:
    """Those after the last step of their metric that was sent. (A resumed run makes some steps again, to the same
    values.)"""
    found: list[Point] = []
    newest = dict(last)
    for point in points:
        if point.step > newest.get(point.name, -1):
            newest[point.name] = point.step
            found.append(point)
    return found


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else ()


def _step(record: Mapping[str, Any]) -> int | None:
    step = record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None


def _time(record: Mapping[str, Any], otherwise: float) -> float:
    when = record.get("time")
    return float(when) if isinstance(when, int | float) and 0 <= when < 1e11 else otherwise


def _is_value(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
