"""Asynchronous successive halving: at each rung, a trial goes on if it is among the best that have been there so far.

Li et al., "A System for Massively Parallel Hyperparameter Tuning", 2020; the variant that stops trials rather than
pausing them, so that none is ever waited for.
"""

import math
from dataclasses import dataclass

from shoal.tune.schedulers.moves import Move, Trials, at
from shoal.tune.trial import SAME, Objective, Trial


def rungs(first: float, length: float, reduction: int) -> list[float]:
    """Progress at which trials are compared: `first`, and each time `reduction` times as far, before the end."""
    found = []
    while first < length - SAME:
        found.append(first)
        first *= reduction
    return found


@dataclass(frozen=True)
class Asha:
    """As `Scheduler`."""

    objective: Objective
    length: float
    grace: float
    reduction: int
    unit: str = "epochs"

    def until(self, trial: Trial) -> float | None:
        """Nowhere: who falls behind is stopped on the way."""
        return None

    def verdict(self, trial: Trial, trials: Trials) -> str | None:
        """Why it is not among the best at the rungs that its last result has reached."""
        for rung in rungs(self.grace, self.length, self.reduction):
            if trial.at(rung) is not trial.results[-1]:
                continue
            own = trial.loss_at(rung, self.objective)
            if not math.isfinite(own):
                return f"{self.objective.metric} is no number {at(rung, self.unit)}"
            others = [other.loss_at(rung, self.objective) for other in trials.values() if other.at(rung) is not None]
            going_on = max(1, len(others) // self.reduction)
            place = 1 + sum(loss < own for loss in others)
            if place > going_on:
                return f"place {place} of {len(others)} {at(rung, self.unit)}, and {going_on} went on"
        return None

    def moves(self, trials: Trials, expects_more: bool) -> list[Move]:
        """None is paused."""
        return []
