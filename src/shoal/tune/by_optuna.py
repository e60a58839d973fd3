"""Proposals by Optuna: TPE over all fields together, or NSGA-II and TPE for several objectives.

The study is made anew from the trials whenever it is asked, and the sampler's seed is the trial's: nothing of Optuna
has to survive a crash, and a search that goes on proposes what it would have proposed. `save_study` writes it to a file
that optuna-dashboard opens.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from shoal.tune.domains import Domain, Options
from shoal.tune.proposals import filled
from shoal.tune.space import Config, Space
from shoal.tune.trial import DIVERGED, Objective, Trial

_STARTUP = 10
"""Trials that are drawn at random before there is something to learn from; fewer in a short search."""


class ByOptuna:
    """As `Proposer`."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int, num_trials: int) -> None:
        self._space = space
        self._objectives = objectives
        self._seed = seed
        self._startup = min(_STARTUP, max(2, num_trials // 3))

    def propose(self, number: int, trials: Mapping[int, Trial]) -> Config:
        """As `Proposer`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=(self._seed * 1_000_003 + number) % 2**32,
                n_startup_trials=self._startup,
                multivariate=True,
                group=True,  # fields that are there only sometimes
                constant_liar=True,  # others run meanwhile
            )
        study = make_study(self._space, self._objectives, trials, sampler)
        asked = study.ask()
        return filled(self._space, number, lambda key: _suggest(asked, key, self._space.domain(key)))


def make_study(
    space: Space,
    objectives: Sequence[Objective],
    trials: Mapping[int, Trial],
    sampler: Any = None,
    storage: Any = None,
    name: str = "shoal",
) -> optuna.Study:
    """The trials as Optuna knows them."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    directions = [
        StudyDirection.MINIMIZE if objective.is_less_better else StudyDirection.MAXIMIZE for objective in objectives
    ]
    study = optuna.create_study(study_name=name, directions=directions, sampler=sampler, storage=storage)
    study.add_trials([_known(space, objectives, trial) for trial in trials.values()])
    return study


def save_study(path: Path, space: Space, objectives: Sequence[Objective], trials: Mapping[int, Trial]) -> None:
    """Write the trials to a file that Optuna's own tools open: its journal storage."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)
    make_study(space, objectives, trials, storage=JournalStorage(JournalFileBackend(str(aside))), name=path.parent.name)
    aside.rename(path)


def _known(space: Space, objectives: Sequence[Objective], trial: Trial) -> optuna.trial.FrozenTrial:
    distributions = {key: _distribution(space.domain(key)) for key in trial.config}
    params = {key: _of_optuna(space.domain(key), value) for key, value in trial.config.items()}
    values = [value for value in trial.values(objectives) if value is not None]
    state, told = TrialState.RUNNING, None
    is_diverged = trial.status == "failed" and trial.kind == DIVERGED
    if is_diverged and len(objectives) == 1:
        state = TrialState.PRUNED  # with nothing to show, so that such settings are kept away from
    elif trial.is_ended and len(values) < len(objectives):
        state = TrialState.FAIL
    elif trial.status == "stopped" and len(objectives) == 1:
        state = TrialState.PRUNED
    elif trial.is_ended:
        state, told = TrialState.COMPLETE, values
    steps: dict[int, float] = {}
    if len(objectives) == 1 and not is_diverged:
        for result in trial.results:
            value = result.metrics.get(objectives[0].metric)
            if value is not None and math.isfinite(value):
                steps[result.step] = value
    return create_trial(
        state=state,
        values=told,
        params=params,
        distributions=distributions,
        intermediate_values=steps,
        user_attrs={"trial": trial.name} | ({"reason": trial.reason} if trial.reason else {}),
    )


def _distribution(domain: Domain) -> BaseDistribution:
    if isinstance(domain, Options):
        return CategoricalDistribution(tuple(range(len(domain.values))) if _is_odd(domain) else domain.values)
    if domain.is_whole:
        return IntDistribution(int(domain.low), int(domain.high), log=domain.is_log)
    return FloatDistribution(domain.low, domain.high, log=domain.is_log)


def _is_odd(domain: Options) -> bool:
    """Whether Optuna would not take its values, or not tell them apart: lists, true and 1. It is told their places."""
    is_simple = all(value is None or isinstance(value, bool | int | float | str) for value in domain.values)
    return not is_simple or len(set(domain.values)) < len(domain.values)


def _of_optuna(domain: Domain, value: Any) -> Any:
    if isinstance(domain, Options):
        index = domain.index(value)
        return index if _is_odd(domain) else domain.values[index]
    return value


def _suggest(trial: optuna.Trial, key: str, domain: Domain) -> Any:
    value = trial._suggest(key, _distribution(domain))
    return domain.values[value] if isinstance(domain, Options) and _is_odd(domain) else value
