"""Who proposes settings. Each proposal depends on the seed, the trial's number and the trials so far, and nothing else:
a search that was killed proposes what it would have proposed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from shoal.core.errors import UserError
from shoal.tune.domains import Options
from shoal.tune.space import Config, Space
from shoal.tune.trial import Objective, Trial


class Proposer(Protocol):
    """Proposes one trial after the other."""

    def propose(self, number: int, trials: Mapping[int, Trial]) -> Config:
        """The settings of a trial."""
        ...


class Randomly:
    """Each field by itself; those of a grid go through its combinations in turn."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._seed = seed
        self._grids = [s for s in space if isinstance(s.domain, Options) and s.domain.is_grid]

    def propose(self, number: int, trials: Mapping[int, Trial]) -> Config:
        """As `Proposer`."""
        random = np.random.default_rng([self._seed, number])
        places = {setting.key: float(random.random()) for setting in self._space}
        turn, left = {}, number
        for setting in reversed(self._grids):  # the last moves fastest
            values = setting.domain.extremes()
            left, index = divmod(left, len(values))
            turn[setting.key] = values[index]
        return filled(self._space, number, lambda key: turn.get(key, self._space.domain(key).at(places[key])))


class EveryPoint:
    """Every combination of a grid."""

    def __init__(self, space: Space) -> None:
        self.points = space.grid()

    def propose(self, number: int, trials: Mapping[int, Trial]) -> Config:
        """As `Proposer`."""
        return self.points[number]


def filled(space: Space, number: int, value_of: Callable[[str], Any]) -> Config:
    """The settings of a trial: of a point to be tried first what it says, and all else by `value_of`."""
    given = space.first[number] if number < len(space.first) else {}
    config: Config = {}
    for setting in space.open_settings(config):
        config[setting.key] = given[setting.key] if setting.key in given else value_of(setting.key)
    return config


def build_proposer(kind: str, space: Space, objectives: Sequence[Objective], seed: int, num_trials: int) -> Proposer:
    """By its name."""
    if kind == "grid":
        return EveryPoint(space)
    if kind == "optuna":
        try:
            from shoal.tune.by_optuna import ByOptuna
        except ImportError as error:
            raise UserError(f"--search: optuna needs Optuna: pip install 'shoal[optuna]' ({error})") from error
        return ByOptuna(space, objectives, seed, num_trials)
    return Randomly(space, seed)
