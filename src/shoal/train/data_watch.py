"""What the workers of a run noticed of its data, as one: told as it comes up, and in the summary."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.core.group import Group
from shoal.data.statistics import MOST_NAMED, DataStatistics
from shoal.observe.records import Observer


@dataclass
class DataWatch:
    """Adds up over the workers, whenever they report; every worker must ask at the same step."""

    statistics: tuple[DataStatistics, ...]
    """This worker's: of training and of validation."""
    group: Group
    observer: Observer
    total: dict[str, Any] = field(default_factory=dict)
    """Over all workers, as of the last report."""
    _named: int = 0

    def own(self) -> list[float]:
        """What this worker counts; added up over all of them, it is what `take` takes."""
        counted = [statistics.counts() for statistics in self.statistics]
        for counts in counted[1:]:
            counts["workers"] = 0  # those of training are told
        return [float(sum(counts[name] for counts in counted)) for name in self._names]

    @property
    def _names(self) -> list[str]:
        return list(self.statistics[0].counts())

    def report(self) -> dict[str, float]:
        """What is added to a report, asked for by itself."""
        return self.take(self.group.sum(*self.own()))

    def take(self, sums: Sequence[float]) -> dict[str, float]:
        """What is added to a report; samples that could not be read are named when they are new."""
        before = self.total.get("skipped", 0)
        self.total |= {name: int(value) for name, value in zip(self._names, sums, strict=True)}
        if self.total["skipped"] > before and len(self.total.get("first_skipped", ())) < MOST_NAMED:
            self._name_them()
        return {"data_skipped": float(self.total["skipped"])} if self.total["skipped"] else {}

    def _name_them(self) -> None:
        own = [asdict(bad) for statistics in self.statistics for bad in statistics.named]
        named = [bad for part in self.group.gather(own) for bad in part]
        words = list(dict.fromkeys(f"{bad['where']}: {bad['why']}" for bad in named))[:MOST_NAMED]
        if words != self.total.get("first_skipped"):
            self.total["first_skipped"] = words
            fields = {"skipped": self.total["skipped"], "named": words, "newest": words[-1]}
            self.observer.event("data_skipped", fields)
