"""What happened in a run, as spans: stretches of time, one inside another. Pure."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.observe.phases import PHASES

Attribute = str | int | float | bool
_ENDS = ("done", "failed", "interrupted")
_CUTS = ("failure", "hang", "preemption", "resize", "restart", *_ENDS)
"""What ends a start of the workers."""


@dataclass(frozen=True)
class Span:
    """A stretch of time."""

    name: str
    id: str
    """16 hexadecimal digits, the same however often it is made of the same run."""
    parent: str | None
    start: float
    """Unix seconds."""
    end: float
    attributes: dict[str, Attribute] = field(default_factory=dict)
    failed: str | None = None
    """What went wrong, where something did."""


def trace_id(key: str) -> str:
    """Of a run: 32 hexadecimal digits."""
    return hashlib.sha256(f"trace {key}".encode()).hexdigest()[:32]


def make_spans(
    key: str, events: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]], ended: float | None
) -> list[Span]:
    """Those that are over: `shoal.run`, and in it a `shoal.start` for every time that workers were started, with
    start-up, training, evaluations and saves; and between two of them a `shoal.restart`.

    Args:
        key: What tells the run from others.
        events: Lines of events.jsonl.
        reports: Lines of metrics.jsonl that tell of an evaluation, and all others where seconds are to be summed.
        ended: When the run ended or stopped, if it has.
    """
    starts = [number for number, event in enumerate(events) if event["event"] == "start"]
    if not starts:
        return []
    root = _id(key, "run")
    spans: list[Span] = []
    cut: float | None = None
    for count, (first, after) in enumerate(zip(starts, [*starts[1:], len(events)], strict=True)):
        start, inside = events[first], events[first + 1 : after]
        stop = next((event for event in inside if event["event"] in _CUTS), None)
        end = stop["time"] if stop is not None else ended if after == len(events) else events[after]["time"]
        if count:
            lost = _forgotten(events, starts[count - 1], first)
            begun = cut if cut is not None and _is_one_session(events, starts, count) else start["time"]
            spans.append(_span(key, "restart", count, root, begun, start["time"], lost))
        asked = start.get("asked")
        if count and _is_one_session(events, starts, count):
            asked = cut
        begun = min(float(asked), start["time"]) if isinstance(asked, int | float) else start["time"]
        last = end if end is not None else float("inf")
        own = [report for report in reports if start["time"] <= _time(report) <= last]
        spans += _of_start(key, count, root, start, inside, own, begun, end, stop)
        cut = end
    if ended is not None:
        facts = {"restarts": len(starts) - 1, "world_size": events[starts[-1]].get("world_size")}
        beginning = min(span.start for span in spans)
        last = next((event for event in reversed(events) if event["event"] in ("done", "failed", "interrupted")), None)
        failed = _words(last) if last is not None and last["event"] == "failed" else None
        spans.append(Span("shoal.run", root, None, beginning, max(ended, beginning), _plain(facts), failed))
    return spans


def _is_one_session(events: Sequence[Mapping[str, Any]], starts: Sequence[int], count: int) -> bool:
    """Whether a start follows the one before it because something failed, and not because somebody resumed the run."""
    asked = events[starts[count]].get("asked")
    return asked is None or asked == events[starts[count - 1]].get("asked")


def _of_start(
    key: str,
    count: int,
    root: str,
    start: Mapping[str, Any],
    inside: Sequence[Mapping[str, Any]],
    reports: Sequence[Mapping[str, Any]],
    begun: float,
    end: float | None,
    stop: Mapping[str, Any] | None,
) -> Iterator[Span]:
    parent = _id(key, "start", count)
    facts = {name: start.get(name) for name in ("step", "world_size", "strategy", "device", "global_batch")}
    first = next((event["time"] for event in inside if event["event"] == "first_step"), None)
    if (ready := first if first is not None else end) is not None:
        marks = start.get("startup_s")
        phases = {f"startup_s.{name}": value for name, value in marks.items()} if isinstance(marks, dict) else {}
        yield _span(key, "startup", count, parent, begun, ready, facts | phases)
    for event in inside:
        if event["event"] == "save":
            took = event.get("seconds")
            took = float(took) if isinstance(took, int | float) else 0.0
            about = {name: event.get(name) for name in ("step", "bytes", "stall_s")}
            yield _span(key, "save", (count, event.get("step")), parent, event["time"] - took, event["time"], about)
    for report in reports:
        if took := _seconds(report).get("evaluate", 0.0):
            about = {"step": report.get("step"), **_values(report)}
            when = _time(report)
            yield _span(key, "evaluate", (count, report.get("step")), parent, when - took, when, about)
    if end is None:
        return
    if first is not None:
        total = {phase: sum(_seconds(report).get(phase, 0.0) for report in reports) for phase in PHASES}
        seconds = {f"seconds.{phase}": round(value, 3) for phase, value in total.items() if value}
        steps = [step for report in reports if isinstance(step := report.get("step"), int)]
        about = {"first_step": start.get("step"), "last_step": max(steps, default=None), **seconds}
        yield _span(key, "training", count, parent, first, end, facts | about)
    failed = _words(stop) if stop is not None and stop["event"] in ("failure", "hang", "failed") else None
    found = _span(key, "start", count, root, begun, end, facts)
    yield Span(found.name, parent, root, found.start, found.end, found.attributes, failed)


def _forgotten(events: Sequence[Mapping[str, Any]], before: int, first: int) -> dict[str, Any]:
    """What the workers did in vain before they were started again."""
    between = events[before + 1 : first]
    nothing: Mapping[str, Any] = {}
    found = next((event for event in reversed(between) if event["event"] == "forgotten"), nothing)
    failure = next((event for event in between if event["event"] in ("failure", "hang", "preemption", "resize")), None)
    facts = {"from_step": found.get("after_step"), "lost_steps_to": found.get("to_step")}
    return facts | ({"because": failure["event"], "message": failure.get("message")} if failure else {})


def _span(
    key: str, name: str, which: Any, parent: str, start: float, end: float, attributes: Mapping[str, Any]
) -> Span:
    return Span(f"shoal.{name}", _id(key, name, which), parent, start, max(end, start), _plain(attributes))


def _id(key: str, *parts: Any) -> str:
    return hashlib.sha256(f"span {key} {parts!r}".encode()).hexdigest()[:16]


def _plain(attributes: Mapping[str, Any]) -> dict[str, Attribute]:
    """What OpenTelemetry takes."""
    return {name: value for name, value in attributes.items() if isinstance(value, str | int | float)}


def _words(event: Mapping[str, Any]) -> str:
    message = event.get("message")
    return message if isinstance(message, str) and message else str(event["event"])


def _time(report: Mapping[str, Any]) -> float:
    when = report.get("time")
    return float(when) if isinstance(when, int | float) else float("-inf")


def _seconds(report: Mapping[str, Any]) -> dict[str, float]:
    found = report.get("seconds")
    return (
        {name: float(s) for name, s in found.items() if isinstance(s, int | float)} if isinstance(found, dict) else {}
    )


def _values(report: Mapping[str, Any]) -> dict[str, Any]:
    found = report.get("metrics")
    return (
        {name: value for name, value in found.items() if str(name).startswith("val_")}
        if isinstance(found, dict)
        else {}
    )
