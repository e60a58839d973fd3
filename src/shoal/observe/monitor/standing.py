"""Whether a run is at work, has ended, or has been silent for too long."""

import socket
from typing import Any

from shoal.observe.monitor.happened import BETWEEN
from shoal.observe.monitor.values import number
from shoal.observe.monitor.watch import RunWatch
from shoal.observe.runs import is_at_work, lock_of

_JUST_NOW_S = 3.0
"""Who wrote that lately is at work; there is no need to try its lock."""
_GRACE_S = 10.0
"""A launcher may need that long to tell that its workers have gone, and starts others."""
_SHORT_S = 60.0


def status_of(watch: RunWatch) -> str:
    """done, failed, interrupted; running, stopped (no word of an end, and nobody seems to be at work), or gone."""
    if watch.is_gone:
        return "gone"
    if watch.happened.ended_by:
        return str(watch.happened.ended_by["event"])
    silent_s = watch.silent_s()
    if silent_s <= _JUST_NOW_S:
        return "running"
    lock = lock_of(watch.path)
    if lock is False and silent_s <= _GRACE_S:
        return "running"
    events = [event for event in (watch.happened.workers, watch.happened.last) if event]
    return "running" if is_at_work(lock, events, silent_s, _longest_pause_s(watch)) else "stopped"


def is_over(watch: RunWatch, status: str) -> bool:
    """Whether nothing more is to come. A run that is only silent may be one whose machine cannot be asked from here."""
    if status != "stopped":
        return status != "running"
    is_here = _host_of_first(watch.happened.workers) == socket.gethostname()
    return is_here and watch.happened.last.get("event") not in BETWEEN and lock_of(watch.path) is False


def _longest_pause_s(watch: RunWatch) -> float:
    """How long a run that is well may write nothing: a few reports, or as long as it waits for machines."""
    failures = watch.recipe.get("failures")
    is_between = watch.happened.last.get("event") in BETWEEN
    machines_s = number(failures.get("machine_timeout_s")) if isinstance(failures, dict) and is_between else None
    return max(_SHORT_S, 3 * watch.reports.report_s, machines_s or 0.0)


def _host_of_first(event: dict[str, Any]) -> Any:
    workers = event.get("workers")
    first = workers[0] if isinstance(workers, list) and workers else None
    return first.get("host") if isinstance(first, dict) else None
