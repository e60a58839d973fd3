"""The workers of a run: what each did, what it used, and who was slow."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from shoal.observe.phases import PHASES, STEPPING
from shoal.observe.report.folder import Folder, number
from shoal.observe.report.thin import rounded, spread, stretches
from shoal.observe.system import NAMES

_MOST_POINTS = 240
"""Of a line over time."""
_MOST_LOOKED_AT = 2 * _MOST_POINTS
"""Lines of which what workers used is read: a mean over so many is as good as one over all."""
_MOST_LINES = 8
"""With more workers than that, their range is drawn instead of each."""
_SLOW = 1.05
"""A worker is slow if it takes so many times what the others do."""
_MOST_WORKERS = 2048

Column = list[float | None]
"""A value a worker, by rank."""


@dataclass(frozen=True)
class _Line:
    """A line of workers.jsonl, with what is not a number left out."""

    time: float
    step: int | None
    over_s: float
    seconds: dict[str, Column]
    system: dict[str, Column] | None
    """None: not looked at."""
    count: int
    """How many workers it tells of."""


def workers_of(folder: Folder) -> dict[str, Any] | None:
    """Workers of the latest start, one by one, and what all used over time; None where nothing tells of them."""
    who = _who(folder)
    looked_at = set(spread(len(folder.workers), _MOST_LOOKED_AT))
    found = [_line(record, place in looked_at) for place, record in enumerate(folder.workers)]
    lines = [line for line in found if line.count]
    recent = _of_the_latest_start(folder, lines, len(who))
    count = max([len(who), *(line.count for line in recent)])
    if not count:
        return None
    seconds = {phase: _sums([line.seconds.get(phase, []) for line in recent], count) for phase in PHASES}
    seconds = {phase: column for phase, column in seconds.items() if any(column)}
    own = [phase for phase in seconds if phase in STEPPING and phase != "comm"]
    systems = [line.system for line in recent if line.system is not None]
    used = {name: _means([system.get(name, []) for system in systems], count) for name in NAMES}
    return {
        "rows": [_row(rank, who.get(rank, {}), seconds, used) for rank in range(min(count, _MOST_WORKERS))],
        "count": count,
        "phases": list(seconds),
        "slowest": slowest([sum(seconds[phase][rank] for phase in own) for rank in range(count)]),
        "over_s": round(sum(line.over_s for line in recent), 1),
        "to_step": recent[-1].step if recent else None,
        "usage": _usage(lines, folder.began),
        "untold": None if recent else _untold(folder),
    }


def _untold(folder: Folder) -> str:
    """Why nothing tells of each worker by itself."""
    if folder.recipe("observe.phases") is False:
        return "What each worker did is not recorded, because observe.phases is false."
    every_s = number(folder.recipe("observe.workers_every_s"))
    if every_s is None:
        return "What each worker did is not recorded: the run is of a version of Shoal that did not."
    when = f"every {every_s:g} s (observe.workers_every_s) and when a run ends by itself"
    if folder.run.status == "running":
        return f"What each worker does is not told yet: that is written {when}."
    return f"What each worker did is not known: that is written {when}, and this one ended before."


def slowest(working_s: list[float]) -> dict[str, Any] | None:
    """The worker that the others wait for, and how many times as long as theirs it takes; None: nobody is slow."""
    if len(working_s) < 2:
        return None
    rank = working_s.index(max(working_s))
    others = median(working_s[:rank] + working_s[rank + 1 :])
    is_slow = others > 0 and working_s[rank] >= _SLOW * others
    return {"rank": rank, "ratio": rounded(working_s[rank] / others, 4)} if is_slow else None


def _who(folder: Folder) -> dict[int, dict[str, Any]]:
    """rank -> what the latest `workers` event says of it."""
    listed = next((e.get("workers") for e in reversed(folder.events) if e["event"] == "workers"), None)
    facts = [worker for worker in listed if isinstance(worker, dict)] if isinstance(listed, list) else []
    return {worker["rank"]: worker for worker in facts if _is_rank(worker.get("rank"))}


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1_000_000


def _line(record: dict[str, Any], is_looked_at: bool) -> _Line:
    step, seconds = record.get("step"), _columns(record.get("seconds"))
    system = _columns(record.get("system")) if is_looked_at else None
    return _Line(
        time=record["time"],
        step=step if isinstance(step, int) else None,
        over_s=number(record.get("over_s")) or 0.0,
        seconds=seconds,
        system=system,
        count=max((len(column) for column in [*seconds.values(), *(system or {}).values()]), default=0),
    )


def _columns(found: Any) -> dict[str, Column]:
    if not isinstance(found, dict):
        return {}
    columns = {name: [number(value) for value in column] for name, column in found.items() if isinstance(column, list)}
    return {name: column for name, column in columns.items() if column.count(None) < len(column)}


def _of_the_latest_start(folder: Folder, lines: list[_Line], count: int) -> list[_Line]:
    """A rank may be somebody else after a restart; of a start that tells nothing yet, the one before must do."""
    since = number(folder.start.get("time")) or 0.0
    recent = [line for line in lines if line.time >= since]
    return recent or [line for line in lines if line.count == (count or lines[-1].count)]


def _sums(columns: list[Column], count: int) -> list[float]:
    sums = [0.0] * count
    for column in columns:
        for rank, value in enumerate(column[:count]):
            sums[rank] += value or 0.0
    return [round(value, 3) for value in sums]


def _means(columns: list[Column], count: int) -> Column:
    """Of each worker; None where no line tells."""
    known = [0] * count
    for column in columns:
        for rank, value in enumerate(column[:count]):
            known[rank] += value is not None
    sums = zip(_sums(columns, count), known, strict=True)
    return [rounded(total / times, 4) if times else None for total, times in sums]


def _row(rank: int, who: dict[str, Any], seconds: dict[str, list[float]], used: dict[str, Column]) -> dict[str, Any]:
    facts = {name: who[name] for name in ("host", "device", "device_name", "pid", "threads") if who.get(name)}
    return {
        "rank": rank,
        **{name: value for name, value in facts.items() if isinstance(value, str | int)},
        "seconds": [column[rank] for column in seconds.values()],
        "system": {name: column[rank] for name, column in used.items() if column[rank] is not None},
    }


def _usage(lines: list[_Line], began: float) -> dict[str, Any] | None:
    """name -> a line a worker over time, or the lowest, middle and highest of many."""
    seen = [(line, line.system) for line in lines if line.system]
    if len(seen) < 2:  # there is no course of a single one, and the table has it
        return None
    names = [name for name in NAMES if any(any(system.get(name, [])) for _, system in seen)]  # not what is 0 all along
    if not names:
        return None
    count = max(line.count for line, _ in seen)
    parts = [seen[begin:end] for begin, end in stretches(len(seen), _MOST_POINTS)]
    return {
        "step": [part[-1][0].step for part in parts],
        "time": [round(part[-1][0].time - began, 1) for part in parts],
        "labels": [f"worker {rank}" for rank in range(count)]
        if count <= _MOST_LINES
        else ["lowest", "middle", "highest"],
        "of": {name: _drawn([[system.get(name, []) for _, system in part] for part in parts], count) for name in names},
    }


def _drawn(parts: list[list[Column]], count: int) -> list[Column]:
    rows = [_means(columns, count) if count <= _MOST_LINES else _range(columns) for columns in parts]
    return [list(line) for line in zip(*rows, strict=True)]


def _range(columns: list[Column]) -> Column:
    values = sorted(value for column in columns for value in column if value is not None)
    return [rounded(value, 4) for value in (values[0], median(values), values[-1])] if values else [None] * 3
