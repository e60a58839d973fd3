"""The median rule: a trial that is worse than most others were on average by then is stopped.

Golovin et al., "Google Vizier", 2017.
"""

import math
import statistics
from dataclasses import dataclass

from shoal.tune.schedulers.moves import Move, Trials, at
from shoal.tune.trial import SAME, Objective, Trial

_FEWEST = 3
"""Others to compare with."""


@dataclass(frozen=True)
class Median:
    """As `Scheduler`."""

    objective: Objective
    grace: float
    unit: str = "epochs"

    def until(self, trial: Trial) -> float | None:
        """Nowhere."""
        return None

    def verdict(self, trial: Trial, trials: Trials) -> str | None:
        """Why its best so far is worse than the median of what others were on average by then."""
        now = trial.progress
        if now < self.grace - SAME:
            return None
        others = [other for other in trials.values() if other.number != trial.number and other.progress >= now - SAME]
        averages = [average for other in others if math.isfinite(average := self._average(other, now))]
        if len(averages) < _FEWEST:
            return None
        best, median = min(self._losses(trial, now)), statistics.median(averages)
        if best <= median:
            return None
        sign = 1 if self.objective.is_less_better else -1
        others_then = f"the median of {len(averages)} others is {sign * median:.4g}"
        return f"its best {at(now, self.unit)} is {sign * best:.4g}, and {others_then}"

    def _losses(self, trial: Trial, until: float) -> list[float]:
        results = [result for result in trial.results if result.progress <= until + SAME]
        return [self.objective.loss(result.metrics.get(self.objective.metric)) for result in results] or [math.inf]

    def _average(self, trial: Trial, until: float) -> float:
        losses = self._losses(trial, until)
        return sum(losses) / len(losses)

    def moves(self, trials: Trials, expects_more: bool) -> list[Move]:
        """None is paused."""
        return []
