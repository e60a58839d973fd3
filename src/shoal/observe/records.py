"""The values that a loop hands over to be seen."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.core.secrets import scrubbed


@dataclass(frozen=True)
class Workers:
    """A line of workers.jsonl: what each worker did and used, by rank, since the line before."""

    over_s: float
    """Seconds that it covers."""
    seconds: Mapping[str, list[float]]
    """phase -> seconds of each worker."""
    system: Mapping[str, list[float | None]]
    """name -> value of each worker, as `observe.system` names them; null where it cannot be known."""
    bottleneck: str
    """What `observe.verdict` makes of it, as a name."""
    verdict: str
    """And in words."""


@dataclass(frozen=True)
class Report:
    """A line of metrics.jsonl."""

    step: int
    epoch: float
    """Passes over the data, with the fraction of the present one."""
    metrics: dict[str, float]
    seconds: dict[str, float]
    """Seconds by phase since the last report: the mean over the workers."""
    samples: int = 0
    """Samples trained on since the very beginning, by all workers."""
    time: float = field(default_factory=time.time)
    """Unix seconds."""
    workers: Workers | None = None
    """Each worker by itself, every so many seconds."""

    def to_record(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "time": round(self.time, 3),
            "step": self.step,
            "epoch": round(self.epoch, 6),
            "samples": self.samples,
            "metrics": self.metrics,
            "seconds": self.seconds,
        }

    def to_message(self) -> dict[str, Any]:
        """With all that there is, as one process tells another."""
        return self.to_record() | {"workers": None if self.workers is None else vars(self.workers)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Report":
        """What `to_message` gave."""
        workers = message["workers"]
        return cls(**message | {"workers": None if workers is None else Workers(**workers)})


class Observer(Protocol):
    """Something that sees a run: its folder, a terminal."""

    def report(self, report: Report) -> None:
        """New metrics."""
        ...

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Something happened: start, save, failure."""
        ...

    def tick(self, step: int) -> None:
        """A step is done; called after every one, so it must cost next to nothing."""
        ...


class Observers:
    """Several observers as one, for several threads: what is saved in the background is told from there."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers
        self._lock = threading.Lock()

    def report(self, report: Report) -> None:
        """To each."""
        with self._lock:
            for observer in self.observers:
                observer.report(report)

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """To each, without what looks like a secret: an address in a message, say."""
        fields = scrubbed(fields)
        with self._lock:
            for observer in self.observers:
                observer.event(name, fields)

    def tick(self, step: int) -> None:
        """To each."""
        with self._lock:
            for observer in self.observers:
                observer.tick(step)
