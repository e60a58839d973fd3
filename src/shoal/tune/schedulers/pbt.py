"""Population based training: now and then the worst take over the weights of the best, and try other settings there.

Jaderberg et al., "Population Based Training of Neural Networks", 2017. All of the population is compared at the same
progress, and every draw depends on the seed, the trial and that progress alone: who is faster changes nothing, and a
population larger than the cluster trains in turns.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.tune.domains import Domain, Options
from shoal.tune.schedulers.moves import Exploit, Go, Move, Trials
from shoal.tune.space import Config, Space
from shoal.tune.trial import DIVERGED, SAME, Objective, Trial

_FACTORS = (0.8, 1.2)
_TRIES = 8


@dataclass(frozen=True)
class Pbt:
    """As `Scheduler`."""

    objective: Objective
    length: float
    interval: float
    quantile: float
    resample: float
    seed: int
    space: Space
    free: Collection[str]
    """Fields that may change while a run goes on; the others are taken over as they are."""

    def until(self, trial: Trial) -> float | None:
        """The next comparison."""
        after = (math.floor((trial.progress + SAME) / self.interval) + 1) * self.interval
        return after if after < self.length - SAME else None

    def verdict(self, trial: Trial, trials: Trials) -> str | None:
        """Never: who lags behind is replaced."""
        return None

    def moves(self, trials: Trials, expects_more: bool) -> list[Move]:
        """When all are there: the worst take over from the best, and all go on."""
        paused = [trial for trial in trials.values() if trial.status == "paused"]
        if expects_more or not paused or any(trial.status in ("waiting", "running") for trial in trials.values()):
            return []
        diverged = [trial for trial in trials.values() if trial.status == "failed" and trial.kind == DIVERGED]
        # Where batches do not divide an epoch, trials pause a little later, each elsewhere.
        passed = {trial.number: math.floor((trial.progress + SAME) / self.interval) for trial in paused}
        if behind := [trial for trial in paused if passed[trial.number] < max(passed.values())]:
            return [Go(trial.number) for trial in behind]  # they failed and were started again
        here = passed[paused[0].number] * self.interval
        ranked = sorted(paused, key=lambda trial: (trial.loss_at(here, self.objective), trial.number))
        share = max(1, int(self.quantile * (len(paused) + len(diverged)) + 1e-9))
        donors = [trial for trial in ranked[:share] if math.isfinite(trial.loss_at(here, self.objective))]
        if not donors:
            return [Go(trial.number) for trial in paused]
        worst = diverged + ranked[max(len(ranked) - max(share - len(diverged), 0), len(donors)) :]
        found: list[Move] = []
        for trial in sorted(paused + diverged, key=lambda trial: trial.number):
            donor = donors[int(self._random(trial, here).integers(len(donors)))]
            is_worse = trial in diverged or trial.loss_at(here, self.objective) > donor.loss_at(here, self.objective)
            if trial in worst and is_worse:
                config = self.explore(donor, trial, here, trials, found)
                for again in range(2, 2 + _TRIES):  # another than who has taken over from the same
                    if not any(isinstance(m, Exploit) and (m.donor, m.config) == (donor.number, config) for m in found):
                        break
                    config = self.explore(donor, trial, here, trials, found, again)
                found.append(Exploit(trial.number, donor.number, here, config))
            elif trial in paused:
                found.append(Go(trial.number))
        return found

    def explore(
        self, donor: Trial, trial: Trial, here: float, trials: Trials, found: list[Move], attempt: int = 1
    ) -> Config:
        """Settings near those of the donor; conditions that no longer hold take their fields along."""
        random = self._random(trial, here, attempt)
        config: Config = {}
        for setting in self.space.open_settings(config):
            draw, direction, place = map(float, random.random(3))
            if setting.key not in donor.config or (setting.key in self.free and draw < self.resample):
                value = setting.domain.at(place)
            elif setting.key in self.free:
                value = moved(setting.domain, donor.config[setting.key], direction >= 0.5)
            else:
                value = donor.config[setting.key]
            config[setting.key] = value
        return config

    def _random(self, trial: Trial, here: float, purpose: int = 0) -> np.random.Generator:
        return np.random.default_rng([self.seed, trial.number, round(here * 1000), purpose])


def moved(domain: Domain, value: Any, is_up: bool) -> Any:
    """A value near another."""
    if isinstance(domain, Options):
        index = domain.index(value) + (1 if is_up else -1)
        return domain.values[min(max(index, 0), len(domain.values) - 1)]
    near = domain.nearest(value * _FACTORS[is_up]) if value else domain.at(0.1 if is_up else 0.0)
    if domain.is_whole and near == value:
        near = domain.nearest(value + (1 if is_up else -1))
    return near
