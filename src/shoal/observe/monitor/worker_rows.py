"""The newest line of workers.jsonl by rank: what each worker did and uses, and who is slow."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.observe.monitor.values import number
from shoal.observe.phases import COMPUTING, PHASES
from shoal.observe.system import NAMES

_SLOWER = 1.02
_MOST_WORKERS = 100_000


@dataclass(frozen=True)
class Worker:
    """One of them."""

    rank: int
    host: str
    device: str
    shares: Mapping[str, float]
    """phase -> share of the time."""
    own_share: float
    """Of the time, what its own part of the steps took: data and computing. Others wait for who takes longest."""
    is_slowest: bool
    system: Mapping[str, float]
    """As `observe.system` names it; without what cannot be known."""

    def to_record(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {**vars(self), "shares": dict(self.shares), "system": dict(self.system)}


def worker_rows(line: Mapping[str, Any], announced: Mapping[str, Any]) -> list[Worker]:
    """By rank.

    Args:
        line: Of workers.jsonl; without one only who they are is known.
        announced: The event that lists them.
    """
    seconds, system = _columns(line.get("seconds"), PHASES), _columns(line.get("system"), NAMES)
    listed = _listed(announced)
    size = max((len(column) for column in seconds.values()), default=0) or len(listed)
    took = [
        {phase: max(column[rank] or 0.0, 0.0) for phase, column in seconds.items() if rank < len(column)}
        for rank in range(size)
    ]
    whole_s = max([number(line.get("over_s")) or 0.0, *(sum(phases.values()) for phases in took)], default=0.0)
    own_s = [sum(phases.get(phase, 0.0) for phase in ("data", *COMPUTING)) for phases in took]
    slowest = _slowest(own_s)
    return [
        Worker(
            rank=rank,
            host=str(listed.get(rank, {}).get("host") or ""),
            device=str(listed.get(rank, {}).get("device") or ""),
            shares={phase: value / whole_s for phase, value in took[rank].items()} if whole_s > 0 else {},
            own_share=own_s[rank] / whole_s if whole_s > 0 else 0.0,
            is_slowest=rank == slowest,
            system={
                name: value
                for name, column in system.items()
                if rank < len(column) and (value := column[rank]) is not None
            },
        )
        for rank in range(size)
    ]


def some_of(workers: Sequence[Worker], most: int) -> list[Worker]:
    """At most so many: the slowest ones, the one in the middle and the fastest, slowest first; or all, by rank."""
    if len(workers) <= most:
        return list(workers)
    by_speed = sorted(workers, key=lambda worker: (-worker.own_share, worker.rank))
    if most < 3:
        return by_speed[: max(most, 0)]
    return [*by_speed[: most - 2], by_speed[max(len(by_speed) // 2, most - 2)], by_speed[-1]]


def _slowest(own_s: Sequence[float]) -> int | None:
    """The rank that others wait for, if there is a difference to speak of."""
    if len(own_s) < 2 or max(own_s) <= 0:
        return None
    rank = max(range(len(own_s)), key=lambda number: own_s[number])
    others = [value for number, value in enumerate(own_s) if number != rank]
    return rank if own_s[rank] > _SLOWER * statistics.median(others) else None


def _columns(values: Any, names: Sequence[str]) -> dict[str, list[float | None]]:
    if not isinstance(values, dict):
        return {}
    lists = {name: values[name] for name in names if isinstance(values.get(name), list)}
    return {name: [number(value) for value in column[:_MOST_WORKERS]] for name, column in lists.items()}


def _listed(event: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    workers = event.get("workers")
    known = [worker for worker in workers if isinstance(worker, dict)] if isinstance(workers, list) else []
    return {worker["rank"]: worker for worker in known if isinstance(worker.get("rank"), int)}
