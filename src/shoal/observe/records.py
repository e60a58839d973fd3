"""The values that a loop hands over to be seen."""

import threading
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Report:
    """A line of metrics.jsonl."""

    step: int
    epoch: float
    """Passes over the data, with the fraction of the present one."""
    metrics: dict[str, float]
    seconds: dict[str, float]
    """Seconds by phase since the last report."""
    samples: int = 0
    """Samples trained on since the very beginning, by all workers."""

    def to_record(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "step": self.step,
            "epoch": round(self.epoch, 6),
            "samples": self.samples,
            "metrics": self.metrics,
            "seconds": self.seconds,
        }


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
        """To each."""
        with self._lock:
            for observer in self.observers:
                observer.event(name, fields)

    def tick(self, step: int) -> None:
        """To each."""
        with self._lock:
            for observer in self.observers:
                observer.tick(step)
