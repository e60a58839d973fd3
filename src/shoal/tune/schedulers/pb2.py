"""PB2: population based training whose new settings come from a model of what made others better, and by how much.

Parker-Holder et al., "Provably Efficient Online Hyperparameter Optimization with Population-Based Bandits", 2020. The
model is a Gaussian process over settings and time, in which what was long ago counts less; settings are chosen where it
expects most or knows least.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoal.tune.domains import Range
from shoal.tune.schedulers.moves import Exploit, Move, Trials
from shoal.tune.schedulers.pbt import Pbt
from shoal.tune.space import Config
from shoal.tune.trial import SAME, Result, Trial

_CANDIDATES = 1000
_NOISE = 1e-2
_LENGTHS = (0.1, 0.2, 0.4, 0.8, 1.6)
_FORGETTING = (0.0, 0.05, 0.2)
_MOST_POINTS = 300


@dataclass(frozen=True)
class Pb2(Pbt):
    """As `Pbt`, but for what is tried next."""

    def explore(
        self, donor: Trial, trial: Trial, here: float, trials: Trials, found: list[Move], attempt: int = 1
    ) -> Config:
        """Numbers that may change are chosen by the model, lists as PBT does."""
        config = super().explore(donor, trial, here, trials, found, attempt)
        keys = [key for key in config if key in self.free and isinstance(self.space.domain(key), Range)]
        points, gains = self._history(trials, keys)
        if not keys or len(gains) < 2:
            return config
        now = here / self.interval
        chosen = [move.config for move in found if isinstance(move, Exploit)]
        pending = np.array(
            [[now, *self._places(other, keys)] for other in chosen if all(key in other for key in keys)]
            or np.empty((0, 0))
        )
        random = self._random(trial, here, 100 + attempt)
        candidates = np.column_stack([np.full(_CANDIDATES, now), random.random((_CANDIDATES, len(keys)))])
        best = candidates[int(np.argmax(_expected(points, gains, pending, candidates)))]
        for key, place in zip(keys, best[1:], strict=True):
            config[key] = self._range(key).at(float(place))
        return config

    def _history(self, trials: Trials, keys: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Time and settings of every interval that a trial has trained, and how much better it became."""
        rows: list[tuple[list[float], float]] = []
        for trial in trials.values():
            for config, since, results in [*trial.past, (trial.config, trial.since, trial.results)]:
                if all(key in config for key in keys):
                    for index, gain in self._gains(since, results):
                        rows.append(([float(index), *self._places(config, keys)], gain))
        newest = sorted(rows, key=lambda row: row[0][0])[-_MOST_POINTS:]
        points, gains = np.array([row for row, _ in newest]), np.array([gain for _, gain in newest])
        for index in set(points[:, 0]) if newest else ():
            # Against the others of that time: what is gained at first would make all that comes later look alike.
            then = points[:, 0] == index
            gains[then] = (gains[then] - gains[then].mean()) / (gains[then].std() + 1e-12)
        return points, gains

    def _gains(self, since: float, results: list[Result]) -> Iterator[tuple[int, float]]:
        """Intervals from `since` on, and how much better each made it."""
        trained = Trial(0, {}, results=results)
        first, last = (int((at + SAME) / self.interval) for at in (since, trained.progress))
        for index in range(max(first, 1), last):
            before, after = (trained.loss_at(at * self.interval, self.objective) for at in (index, index + 1))
            if math.isfinite(before) and math.isfinite(after):
                yield index, before - after

    def _places(self, config: Config, keys: list[str]) -> list[float]:
        return [self._range(key).place(config[key]) for key in keys]

    def _range(self, key: str) -> Range:
        domain = self.space.domain(key)
        assert isinstance(domain, Range)
        return domain


def _expected(points: np.ndarray, gains: np.ndarray, pending: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """An upper bound of what each candidate may gain; less uncertain near points that others are about to try."""
    scaled = (gains - gains.mean()) / (gains.std() + 1e-9)
    fits = [
        (_evidence(points, scaled, length, forget), length, forget) for length in _LENGTHS for forget in _FORGETTING
    ]
    _, length, forget = max(fits)
    across = _kernel(candidates, points, length, forget)
    mean = across @ np.linalg.solve(_kernel(points, points, length, forget) + _NOISE * np.eye(len(points)), scaled)
    known = np.vstack([points, pending]) if len(pending) else points
    near = _kernel(candidates, known, length, forget)
    solved = np.linalg.solve(_kernel(known, known, length, forget) + _NOISE * np.eye(len(known)), near.T)
    variance = np.clip(1.0 - np.einsum("ij,ji->i", near, solved), 1e-12, None)
    weight = math.sqrt(max(0.2 * points.shape[1] * math.log(2 * len(known)), 0.0))
    bound: np.ndarray = mean + weight * np.sqrt(variance)
    return bound


def _kernel(left: np.ndarray, right: np.ndarray, length: float, forget: float) -> np.ndarray:
    distance = ((left[:, None, 1:] - right[None, :, 1:]) ** 2).sum(-1)
    apart = np.abs(left[:, None, 0] - right[None, :, 0])
    similar: np.ndarray = np.exp(-distance / (2 * length**2)) * (1 - forget) ** (apart / 2)
    return similar


def _evidence(points: np.ndarray, gains: np.ndarray, length: float, forget: float) -> float:
    """How well a model explains what was seen: its log likelihood."""
    factor = np.linalg.cholesky(_kernel(points, points, length, forget) + _NOISE * np.eye(len(points)))
    solved = np.linalg.solve(factor, gains)
    return float(-0.5 * solved @ solved - np.log(np.diag(factor)).sum())
