"""Where every worker-second of a run went, from the moment it was asked for to its end; and what that cost.

Made from what is in the run's folder, so that it can be had of any run, one that failed or still goes on included:
times of events say how long the workers were held, reports say what they did, and what is in neither is shown as not
accounted for.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.observe.phases import COMPUTING
from shoal.observe.runs import iterate_metrics, read_events

CATEGORIES = (
    "useful",
    "data",
    "recomputed",
    "startup",
    "restart",
    "compile",
    "checkpoint",
    "evaluate",
    "report",
    "idle",
)
LABELS = {
    "useful": "training steps",
    "data": "waiting for data",
    "recomputed": "steps that were lost",
    "startup": "start-up",
    "restart": "starting again",
    "compile": "compiling",
    "checkpoint": "saving",
    "evaluate": "evaluation",
    "report": "reporting",
    "idle": "idle",
}
"""For people. Lost are steps after the last checkpoint of a start that failed: made again, or made for nothing."""
_OF_PHASE = {
    **dict.fromkeys(COMPUTING, "useful"),
    "comm": "useful",
    "data": "data",
    "compile": "compile",
    "checkpoint": "checkpoint",
    "evaluate": "evaluate",
    "report": "report",
    "start": "startup",
    "end": "idle",
}
_ENDS = ("done", "failed", "interrupted", "failure", "restart", "resize")
_MOST = 1e12
"""Of whatever is counted here, seconds since 1970 included: more is nonsense."""
_SIGNS_OF_WORK = ("workers", "first_step", "save")
"""Events of workers that train; others may be of those who come after them."""


@dataclass(frozen=True)
class Ledger:
    """Worker-seconds by what they went to."""

    seconds: Mapping[str, float]
    """category -> worker-seconds, for every one of CATEGORIES."""
    worker_s: float
    """Wall time times workers: what they must add up to."""

    @property
    def goodput(self) -> float:
        """The share that went into steps which count."""
        return self.seconds["useful"] / self.worker_s if self.worker_s > 0 else 0.0

    @property
    def unaccounted_s(self) -> float:
        """What nothing tells of; below zero if more is told than there was time for."""
        return self.worker_s - sum(self.seconds.values())

    def cost(self, price_per_hour: float) -> dict[str, float]:
        """category -> money, where one worker costs that much an hour; with `total`, which is of all the time."""
        money = {name: seconds / 3600 * price_per_hour for name, seconds in self.seconds.items()}
        return money | {"total": self.worker_s / 3600 * price_per_hour}

    def to_record(self, price_per_hour: float | None = None) -> dict[str, Any]:
        """As it is written; with what it cost, where there is a price."""
        priced = {}
        if price_per_hour is not None:
            priced["cost"] = {name: round(money, 4) for name, money in self.cost(price_per_hour).items()}
        return {
            "worker_s": round(self.worker_s, 3),
            "seconds": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "unaccounted_s": round(self.unaccounted_s, 3),
            "goodput": round(self.goodput, 4),
            **priced,
        }


def read_ledger(run_dir: Path, until: float | None = None) -> Ledger:
    """The ledger of a run's folder; of one that still goes on, as far as its last report or until a time."""
    return make_ledger(read_events(run_dir), iterate_metrics(run_dir), until)


@dataclass
class _Start:
    """One start of the workers, with the time that they were held for it."""

    told: float
    """When it was announced."""
    world_size: int
    begins: float
    """When it was asked for, or the start before it ended."""
    clock: float
    """When its reports begin to count."""
    before: str
    """What the time until then is: `startup`, or `restart` where an earlier start of the same session ended."""
    step: int
    ends: float
    ended_by: str | None = None
    closing: Any = None
    """Seconds since the last report, as the end itself tells them."""
    forgotten: list[Any] = field(default_factory=list)
    """Seconds of reports that are no longer there, because their steps were lost."""
    still_s: float = 0.0
    """Of the time before it failed, that in which nothing happened."""
    kept_step: int | None = None
    """What was lost: the steps after this one. None where nothing was, or where it is among the forgotten."""
    told_s: float = 0.0
    """Of one worker's time, what reports tell of."""
    reported: float = 0.0
    """When the last report came."""

    @property
    def is_lost(self) -> bool:
        """Whether it ended without saving."""
        return self.ended_by in ("failure", "failed", "restart", "vanished")


def make_ledger(
    events: Sequence[Mapping[str, Any]], reports: Iterable[Mapping[str, Any]], until: float | None = None
) -> Ledger:
    """The ledger of these events and reports, as they are read from a run's folder; reports may be millions."""
    starts = _starts(events)
    booked = dict.fromkeys(CATEGORIES, 0.0)
    kept = _whose_reports_are_kept(starts)
    for report in reports:
        if kept and (when := _number(report.get("time"))) is not None:
            place = bisect.bisect_left(kept, report["step"], key=lambda start: start.step) - 1
            _book_report(booked, kept[max(place, 0)], report, when)
    for number, start in enumerate(starts):
        is_last = number == len(starts) - 1
        if start.ended_by in (None, "vanished"):
            start.ends = max(start.ends, start.reported)
        if is_last and start.ended_by is None and until is not None:
            start.ends = max(start.ends, until)
        _book_rest(booked, start)
    return Ledger(booked, sum(start.world_size * max(start.ends - start.begins, 0.0) for start in starts))


def _whose_reports_are_kept(starts: Sequence[_Start]) -> list[_Start]:
    """Those of which there can be reports, by the step they began with.

    A start drops the reports of steps that it makes again, so a report is of the last start that began before its step,
    whatever the clocks of machines say.
    """
    kept: list[_Start] = []
    for start in starts:
        while kept and kept[-1].step >= start.step:
            kept.pop()
        kept.append(start)
    return kept


def _starts(events: Sequence[Mapping[str, Any]]) -> list[_Start]:
    found: list[_Start] = []
    asked = None
    saved_step = 0
    for event in events:
        name, when = event["event"], event["time"]
        if name == "start":
            was_asked, asked = asked, _number(event.get("asked"))
            is_same = bool(found) and asked is not None and asked == was_asked
            found.append(_begin(event, found[-1] if is_same else None, asked))
        if not found:
            continue
        current = found[-1]
        if name == "save":
            saved_step = max(saved_step, int(_number(event.get("step")) or 0))
        if name == "forgotten":
            current.forgotten.append(event.get("seconds"))
            current.kept_step = None
            if current.ended_by is None:  # killed with its launcher, so that nobody could tell
                current.ended_by, current.ends = "vanished", max(current.ends, _number(event.get("until")) or 0.0)
        elif current.ended_by is not None:
            continue
        elif name in _ENDS:
            current.ends, current.ended_by, current.closing = max(when, current.clock), name, event.get("seconds")
            if current.is_lost:
                current.kept_step = max(saved_step, current.step)
        elif name == "hang":
            current.still_s = _number(event.get("timeout_s")) or 0.0
        elif name in _SIGNS_OF_WORK:
            current.ends = max(current.ends, when)
    return found


def _begin(event: Mapping[str, Any], earlier: _Start | None, asked: float | None) -> _Start:
    """`earlier`: the start before it in the same session."""
    told, size = event["time"], event.get("world_size")
    clock = _number(event.get("clock"))
    begins = min(earlier.ends if earlier is not None else told if asked is None else asked, told)
    return _Start(
        told=told,
        world_size=size if isinstance(size, int) and size > 0 else 1,
        begins=begins,
        clock=told if clock is None else max(clock, begins),
        before="startup" if earlier is None else "restart",
        step=int(_number(event.get("step")) or 0),
        ends=told,
    )


def _book_report(booked: dict[str, float], start: _Start, report: Mapping[str, Any], when: float) -> None:
    """What the workers did between one report and the next."""
    is_lost = start.kept_step is not None and report["step"] > start.kept_step
    start.told_s += _add(booked, start, report.get("seconds"), is_lost=is_lost)
    start.reported = max(start.reported, when)


def _book_rest(booked: dict[str, float], start: _Start) -> None:
    """What they did that no report tells of."""
    size = start.world_size
    booked[start.before] += size * max(start.clock - start.begins, 0.0)
    for seconds in start.forgotten:
        start.told_s += _add(booked, start, seconds, is_lost=True)
    if start.closing is not None:
        _add(booked, start, start.closing, is_lost=start.is_lost)
    elif start.is_lost:  # what came after the last report went with the workers
        left_s = max(start.ends - start.clock - start.told_s, 0.0)
        idle_s = min(start.still_s, left_s)
        booked["idle"] += size * idle_s
        booked["recomputed"] += size * (left_s - idle_s)


def _add(booked: dict[str, float], start: _Start, seconds: Any, *, is_lost: bool) -> float:
    """Book seconds by phase, a mean over the workers; how many that is of one worker."""
    total = 0.0
    for phase, value in _numbers(seconds):
        category = _OF_PHASE.get(phase, "idle")
        if category == "startup":
            category = start.before
        elif is_lost and phase != "end":
            category = "recomputed"
        booked[category] += start.world_size * value
        total += value
    return total


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _MOST:
        return None
    return float(value)


def _numbers(seconds: Any) -> Iterable[tuple[str, float]]:
    if isinstance(seconds, Mapping):
        for phase, value in seconds.items():
            if (number := _number(value)) is not None and number > 0:
                yield phase, number
