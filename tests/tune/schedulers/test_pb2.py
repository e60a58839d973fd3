"""PB2 on made-up trials: its model finds the settings that made others better."""

import math

import pytest

from shoal.tune.schedulers.moves import Exploit, Go
from shoal.tune.schedulers.pb2 import Pb2
from shoal.tune.schedulers.pbt import Pbt
from shoal.tune.space import Config, Space, parse_space
from shoal.tune.trial import Objective, Result, Trial
from tests.tune.made_trials import ACCURACY, LOSS, MadeSearch, made

SPACE = parse_space({"optim.lr": "loguniform(1e-6, 1)", "optim.name": "choice(a, b)", "optim.x": "randint(1, 5)"})
GOOD = -3.0
"""log10 of the learning rate that gains most."""


def pb2(seed: int = 0, objective: Objective = LOSS, space: Space = SPACE, free: str = "optim.lr") -> Pb2:
    return Pb2(objective, 20.0, 1.0, 0.25, 0.25, seed, space, {free})


def gain(config: Config) -> float:
    return math.exp(-((math.log10(config["optim.lr"]) - GOOD) ** 2) / 2)


def spread(count: int, epochs: int, objective: Objective = LOSS, space: Space = SPACE) -> dict[int, Trial]:
    """A population over all of the range, each with what its learning rate has gained."""
    sign = 1 if objective.is_less_better else -1
    domain = space.domain("optim.lr")
    trials = {}
    for number in range(count):
        config = {"optim.lr": domain.at((number + 0.5) / count), "optim.name": "ab"[number % 2], "optim.x": 3}
        values: list[float | None] = [sign * (50.0 - epoch * gain(config)) for epoch in range(1, epochs + 1)]
        trials[number] = made(number, values, "paused", config, objective)
    return trials


@pytest.mark.parametrize("objective", [LOSS, ACCURACY])
def test_proposals_gather_where_most_is_gained(objective: Objective) -> None:
    trials = spread(16, 4, objective)
    found = []
    for seed in range(20):
        config = pb2(seed, objective).explore(trials[0], trials[15], 4.0, trials, [])
        found.append(math.log10(config["optim.lr"]))
        assert config["optim.x"] == 3 and config["optim.name"] == "a", "what may not change is the donor's"
    near = sum(abs(exponent - GOOD) < 1 for exponent in found)
    assert near >= 16, f"of 20, by chance 7: {found}"


def test_those_who_take_over_at_once_do_not_all_try_the_same() -> None:
    trials = spread(3, 3)  # of which little is known
    place = SPACE.domain("optim.lr").place
    for seed in range(5):
        one = pb2(seed).explore(trials[0], trials[2], 3.0, trials, [])
        other = pb2(seed).explore(trials[0], trials[2], 3.0, trials, [Exploit(1, 0, 3.0, one), Go(0)])
        assert abs(place(one["optim.lr"]) - place(other["optim.lr"])) > 0.02


def test_the_same_trials_give_the_same() -> None:
    trials = spread(8, 3)
    assert pb2().moves(trials, expects_more=False) == pb2().moves(dict(trials), expects_more=False)
    assert pb2(1).moves(trials, expects_more=False) != pb2().moves(trials, expects_more=False)


@pytest.mark.parametrize("epochs", [1, 2, 6])
@pytest.mark.parametrize("value", [0.0, 1e30, None, math.nan])
def test_whatever_was_gained_proposals_stay_in_their_ranges(epochs: int, value: float | None) -> None:
    trials = spread(6, epochs)
    for number in (1, 2, 4):
        trials[number].results[-1] = Result(10 * epochs, float(epochs), {"val_loss": value})  # type: ignore[dict-item]
    for trial in trials.values():
        config = pb2().explore(trials[0], trial, float(epochs), trials, [])
        assert all(SPACE.domain(key).holds(found) for key, found in config.items())


def test_before_anything_was_gained_it_does_as_pbt() -> None:
    trials = spread(6, 1)
    as_pbt = Pbt(LOSS, 20.0, 1.0, 0.25, 0.25, 0, SPACE, {"optim.lr"})
    for trial in trials.values():
        assert pb2().explore(trials[0], trial, 1.0, trials, []) == as_pbt.explore(trials[0], trial, 1.0, trials, [])


def test_lists_are_moved_as_pbt_does() -> None:
    trials = spread(6, 4)
    found = [pb2(seed, free="optim.name").explore(trials[0], trials[5], 4.0, trials, []) for seed in range(20)]
    assert {config["optim.name"] for config in found} == {"a", "b"}
    assert {config["optim.lr"] for config in found} == {trials[0].config["optim.lr"]}


def test_a_range_that_is_there_only_sometimes_is_borne() -> None:
    space = parse_space(
        {"optim.name": "choice(a, b)", "optim.lr": "loguniform(1e-6, 1)", "optim.m": "uniform(0, 1) if optim.name == b"}
    )
    trials = spread(8, 3, space=space)
    for trial in trials.values():
        del trial.config["optim.x"]
        if trial.config["optim.name"] == "b":
            trial.config["optim.m"] = 0.5
    scheduler = Pb2(LOSS, 20.0, 1.0, 0.5, 0.25, 0, space, set(space.keys))
    moves = [move for move in scheduler.moves(trials, expects_more=False) if isinstance(move, Exploit)]
    assert moves
    for move in moves:
        assert set(move.config) == {setting.key for setting in space.open_settings(move.config)}
        assert all(space.domain(key).holds(value) for key, value in move.config.items())


def test_gains_are_those_of_the_settings_that_made_them() -> None:
    """An heir has its donor's history: what that gained is not counted for the heir's settings."""
    trial = made(0, [9.0, 7.0, 6.0, 3.0], "paused", {"optim.lr": 1e-1})
    trial.past = [({"optim.lr": 1e-5}, 0.0, made(0, [20.0, 19.5]).results)]
    trial.lineage = [{"from": 1, "progress": 2.0, "config": trial.config}]
    other = made(1, [9.0, 8.5, 5.0, 4.5], "paused", {"optim.lr": 1e-3})
    points, gains = pb2()._history({0: trial, 1: other}, ["optim.lr"])
    place = SPACE.domain("optim.lr").place
    rates = {1: [1e-5, 1e-3], 2: [1e-1, 1e-3], 3: [1e-1, 1e-3]}
    assert points.tolist() == [[float(at), place(rate)] for at, both in rates.items() for rate in both]
    # Gains of 0.5 and 0.5, 1.0 and 3.5, 3.0 and 0.5: against those of the same time.
    assert gains.tolist() == pytest.approx([0.0, 0.0, -1.0, 1.0, 1.0, -1.0])


def test_of_a_long_history_the_newest_counts() -> None:
    trials = spread(40, 19)
    points, _ = pb2()._history(trials, ["optim.lr"])
    assert len(points) == 300 and set(points[:, 0]) == set(range(11, 19)), "of all trials, not all of the last ones"
    assert len(set(points[points[:, 0] == 18][:, 1])) == 40


def test_a_population_finds_the_good_settings_in_the_end() -> None:
    def value_of(trial: Trial, progress: float) -> float:
        before = trial.results[-1].metrics["val_loss"] if trial.results else 50.0
        return before - gain(trial.config)

    def propose(number: int) -> Config:
        return {"optim.lr": 1e-6 * 2.0**number, "optim.name": "a", "optim.x": 1}  # all of them far too small

    trials = MadeSearch(pb2(), 8, 20, value_of, propose).run()
    best = min(trials.values(), key=lambda trial: trial.results[-1].metrics["val_loss"])
    assert best.generation > 0 and best.results[-1].metrics["val_loss"] < 50 - 8
    late = [move["config"]["optim.lr"] for trial in trials.values() for move in trial.lineage if move["progress"] >= 12]
    assert len(late) >= 8 and sum(abs(math.log10(lr) - GOOD) < 1 for lr in late) > 0.6 * len(late)
