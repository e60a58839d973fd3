"""Optuna is told all that trials tell, and proposes better than chance."""

import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from shoal.tune.by_optuna import ByOptuna, make_study, save_study
from shoal.tune.proposals import Proposer, Randomly
from shoal.tune.space import Config, Space, parse_space
from shoal.tune.trial import Objective, Result, Trial
from tests.tune.made_trials import ACCURACY, BOTH, LOSS, by_number, made

SMOOTH = parse_space({"a.x": "uniform(-5, 5)", "a.y": "loguniform(1e-5, 1)", "a.z": "uniform(0, 1)"})
ODD = parse_space(
    {
        "a.list": "choice([64], [64, 32], [a, null])",
        "a.none": "choice(null, 0.1)",
        "a.bool": "choice(true, 1, 0, false)",
        "a.more": "randint(1, 9) if a.list == [64, 32]",
        "a.log": "lograndint(1, 512) if a.bool == true",
        "a.grid": "grid(1, 2)",
    }
)


def smooth(config: Config) -> float:
    return float((config["a.x"] - 2) ** 2 + (math.log10(config["a.y"]) + 3) ** 2 + config["a.z"])


def searched(proposer: Proposer, count: int) -> list[float]:
    trials: dict[int, Trial] = {}
    for number in range(count):
        config = proposer.propose(number, trials)
        trials[number] = made(number, [smooth(config)], "done", config)
    return [smooth(trial.config) for trial in trials.values()]


def test_it_finds_better_settings_than_chance() -> None:
    seeds = range(12)
    by_optuna = [searched(ByOptuna(SMOOTH, [LOSS], seed, 30), 30) for seed in seeds]
    by_chance = [searched(Randomly(SMOOTH, seed), 30) for seed in seeds]
    assert statistics.mean(map(min, by_optuna)) < 0.8 * statistics.mean(map(min, by_chance))
    later = [statistics.median(value for values in found for value in values[15:]) for found in (by_optuna, by_chance)]
    assert later[0] < 0.5 * later[1], "and learns where to look"


def test_more_is_better_where_that_was_said() -> None:
    trials: dict[int, Trial] = {}
    proposer = ByOptuna(SMOOTH, [ACCURACY], 0, 30)
    for number in range(30):
        config = proposer.propose(number, trials)
        trials[number] = made(number, [-smooth(config)], "done", config, ACCURACY)
    early, late = ([smooth(trials[n].config) for n in numbers] for numbers in (range(10), range(20, 30)))
    assert statistics.median(late) < statistics.median(early)


def trials_of_every_kind(space: Space, objectives: Sequence[Objective] = (LOSS,)) -> dict[int, Trial]:
    """One of each status, some without a value, told apart by their number."""
    chance = Randomly(space, 0)
    kinds: list[tuple[Any, list[float | None]]] = [
        ("done", [3.0, 1.0]),
        ("stopped", [2.0]),
        ("failed", [2.0, 4.0]),
        ("failed", []),
        ("failed", [None]),
        ("running", [1.0]),
        ("waiting", []),
        ("paused", [1.0, None]),
        ("stopped", []),
        ("done", []),
        ("done", [math.nan, 5.0]),
    ]
    found = [made(number, values, status, chance.propose(number, {})) for number, (status, values) in enumerate(kinds)]
    for trial in found:
        trial.results = [
            Result(r.step, r.progress, {o.metric: r.metrics["val_loss"] for o in objectives}) for r in trial.results
        ]
    return by_number(*found)


STATES = [
    *(TrialState.COMPLETE, TrialState.PRUNED, TrialState.COMPLETE, TrialState.FAIL, TrialState.FAIL),
    *(
        TrialState.RUNNING,
        TrialState.RUNNING,
        TrialState.RUNNING,
        TrialState.FAIL,
        TrialState.FAIL,
        TrialState.COMPLETE,
    ),
]


@pytest.mark.parametrize("space", [SMOOTH, ODD])
@pytest.mark.parametrize("objectives", [[LOSS], BOTH])
def test_trials_of_every_kind_are_borne(space: Space, objectives: list[Objective]) -> None:
    trials = trials_of_every_kind(space, objectives)
    proposer = ByOptuna(space, objectives, 0, 6)
    for number in range(len(trials), len(trials) + 6):
        config = proposer.propose(number, trials)
        assert config == proposer.propose(number, trials) == ByOptuna(space, objectives, 0, 6).propose(number, trials)
        assert set(config) == {setting.key for setting in space.open_settings(config)}
        for key, value in config.items():
            assert space.domain(key).holds(value)
            if isinstance(value, bool | int):
                options = space.domain(key).extremes()
                assert type(value) in {type(option) for option in options}
        trials[number] = made(number, [1.0], "running", config)


def test_the_study_has_what_the_trials_have() -> None:
    trials = trials_of_every_kind(SMOOTH)
    study = make_study(SMOOTH, [LOSS], trials)
    assert [trial.state for trial in study.trials] == STATES
    assert study.best_value == 1.0 and study.best_trial.number == 0, "the best of its evaluations"
    assert study.trials[0].intermediate_values == {10: 3.0, 20: 1.0}
    assert study.trials[10].intermediate_values == {20: 5.0} and study.trials[10].value == 5.0
    assert [trial.params for trial in study.trials] == [trial.config for trial in trials.values()]


def test_several_objectives_are_told_by_the_best_evaluation() -> None:
    trials = trials_of_every_kind(SMOOTH, BOTH)
    study = make_study(SMOOTH, BOTH, trials)
    pruned = TrialState.COMPLETE  # there is no such thing with several objectives
    assert [trial.state for trial in study.trials] == [pruned if s is TrialState.PRUNED else s for s in STATES]
    assert study.trials[0].values == [1.0, 1.0] and study.trials[2].values == [2.0, 2.0]
    assert [direction.name for direction in study.directions] == ["MINIMIZE", "MAXIMIZE"]


def test_true_is_not_told_as_1() -> None:
    values = [True, 1, 0, False]
    trials = {number: made(number, [1.0], "done", {"a.bool": value}) for number, value in enumerate(values)}
    study = make_study(parse_space({"a.bool": "choice(true, 1, 0, false)"}), [LOSS], trials)
    assert [trial.params["a.bool"] for trial in study.trials] == [0, 1, 2, 3]


def test_a_study_is_saved_for_optunas_own_tools(tmp_path: Path) -> None:
    folder = tmp_path / "mnist-1"
    folder.mkdir()
    trials = trials_of_every_kind(ODD)
    trials[1].reason = "place 3 of 3"
    for _ in range(2):  # it is written anew each time
        save_study(folder / "optuna.journal", ODD, [LOSS], trials)
    storage = JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
    study = optuna.load_study(study_name="mnist-1", storage=storage)
    assert [trial.state for trial in study.trials] == STATES
    assert study.trials[1].user_attrs == {"trial": "0001", "reason": "place 3 of 3"}
    assert study.best_value == 1.0
    assert [path.name for path in folder.iterdir()] == ["optuna.journal"], "and nothing is left beside it"


def test_it_knows_no_trial_at_first() -> None:
    config = ByOptuna(ODD, [LOSS], 0, 1).propose(0, {})
    assert set(config) == {setting.key for setting in ODD.open_settings(config)}


def test_another_process_proposes_the_same() -> None:
    """A search that goes on is another process, whose strings hash otherwise."""
    code = (
        "from tests.tune.test_by_optuna import *; t = trials_of_every_kind(ODD);"
        "print([ByOptuna(ODD, [LOSS], 0, 6).propose(n, t) for n in range(11, 15)])"
    )
    own = [ByOptuna(ODD, [LOSS], 0, 6).propose(n, trials_of_every_kind(ODD)) for n in range(11, 15)]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip().splitlines()[-1] == repr(own)
