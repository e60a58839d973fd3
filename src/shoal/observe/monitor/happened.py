"""What events.jsonl says of a run, line by line, in bounded memory."""

from collections import deque
from typing import Any

from shoal.observe.monitor.values import number, numbers

ENDED = ("done", "failed", "interrupted")
BETWEEN = ("failure", "restart", "resize", "preemption", "hang")
"""After these, workers end and others are started."""
_FOR_LEDGER = ("start", "workers", "first_step", "save", "forgotten", "hang", *ENDED, *BETWEEN)
_FIELDS = ("time", "asked", "clock", "world_size", "step", "timeout_s", "until")
_NOT_TOLD = ("workers", "first_step", "save", "initial_weights", "settled", "print", "waiting", "upload", "data")


class Happened:
    """Events so far."""

    def __init__(self) -> None:
        self.start: dict[str, Any] = {}
        """The newest start."""
        self.starts = 0
        self.workers: dict[str, Any] = {}
        """The newest list of workers."""
        self.last: dict[str, Any] = {}
        self.ended_by: dict[str, Any] = {}
        """The event of the end, as long as no start follows."""
        self.save: dict[str, Any] = {}
        """The newest checkpoint."""
        self.save_failed: dict[str, Any] = {}
        """That saving fails, as long as none has succeeded since."""
        self.told: deque[dict[str, Any]] = deque(maxlen=64)
        """Those that a person may want to read of."""
        self.kept: list[dict[str, Any]] = []
        """Those that a ledger is made from; of saves in a row the last."""
        self.failures: deque[dict[str, Any]] = deque(maxlen=20)
        self.num_failures = 0
        self.restarts = 0
        self.is_stepping = False
        """Whether the workers have made a step since they were last started."""
        self.waits_since = 0.0
        """If not: since when."""
        self.worked_s = 0.0
        """What earlier sessions took, from start to end."""
        self.session_began = 0.0
        """When the present one was asked for; 0 if there is none."""
        self.newest = 0.0
        self._times: deque[float] = deque(maxlen=256)
        """Of the latest events."""

    def add(self, event: dict[str, Any]) -> None:
        """A line."""
        when = number(event.get("time"))
        name = event.get("event")
        if when is None or not isinstance(name, str):
            return
        if name == "start":
            self.starts += 1
            self._start(event, when)
        elif name == "workers":
            self.workers = event
        elif name == "first_step":
            self.is_stepping = True
        elif name == "save":
            self.save, self.save_failed = event, {}
        elif name == "save_failed":
            self.save_failed = event
        elif name == "failure":
            self.failures.append(event)
            self.num_failures += 1
        elif name == "restart":
            self.restarts += 1
        elif name in ENDED:
            self._end(event, when)
        if name in BETWEEN:
            self.waits_since = when if self.is_stepping or not self.waits_since else self.waits_since
            self.is_stepping = False
        if name not in _NOT_TOLD:
            self.told.append(event)
        self._keep(name, event)
        self.last = event
        self.newest = max(self.newest, when)
        self._times.append(when)

    def _start(self, event: dict[str, Any], when: float) -> None:
        asked = number(event.get("asked"))
        is_new = not self.start or bool(self.ended_by) or asked != number(self.start.get("asked"))
        if is_new:
            began = when if asked is None else min(asked, when)
            if self.session_began:  # the one before was killed, and nobody told of its end
                # Some events of this one came before its start: what it resumes, for one.
                last = max((time for time in self._times if time <= began), default=self.session_began)
                self.worked_s += max(0.0, last - self.session_began)
            self.session_began = self.waits_since = began
        self.start, self.ended_by, self.is_stepping = event, {}, False

    def _end(self, event: dict[str, Any], when: float) -> None:
        self.ended_by = event
        if self.session_began:
            self.worked_s += max(0.0, when - self.session_began)
            self.session_began = 0.0

    def _keep(self, name: str, event: dict[str, Any]) -> None:
        if name not in _FOR_LEDGER:
            return
        if name == "save" and self.kept and self.kept[-1]["event"] == "save":
            self.kept.pop()
        self.kept.append(_for_ledger(name, event))


def _for_ledger(name: str, event: dict[str, Any]) -> dict[str, Any]:
    """What a ledger asks of an event, as far as it can be counted with."""
    facts = {field: event[field] for field in _FIELDS if number(event.get(field)) is not None}
    return {"event": name, **facts} | ({"seconds": numbers(event["seconds"])} if "seconds" in event else {})
