"""A proposal depends on the seed, the trial's number and the trials so far, and on nothing else."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.tune.domains import Options
from shoal.tune.proposals import build_proposer
from shoal.tune.space import Config, Space, parse_space
from shoal.tune.trial import Trial
from tests.tune.made_trials import LOSS, made
from tests.tune.test_space import spaces

TREE: dict[str, Any] = {
    "optim.lr": "loguniform(1e-5, 1e-1)",
    "optim.name": "choice(adamw, sgd)",
    "optim.momentum": "uniform(0.5, 0.99) if optim.name == sgd",
    "model.layers": "randint(1, 4)",
    "model.hidden": "choice([64], [64, 32])",
    "optim.clip": "choice(null, 1.0, true)",
}
SPACE = parse_space(TREE)


def proposed(kind: str, space: Space, seed: int, count: int, num_trials: int = 40) -> list[Config]:
    """The proposals of a search whose trials end at once."""
    proposer = build_proposer(kind, space, [LOSS], seed, num_trials)
    trials: dict[int, Trial] = {}
    for number in range(count):
        config = proposer.propose(number, trials)
        trials[number] = made(number, [float(number % 5)], "done", config)
    return [trial.config for trial in trials.values()]


def check(space: Space, config: Config) -> None:
    """Each field is in its domain, and there if and only if its condition holds."""
    assert set(config) == {setting.key for setting in space.open_settings(config)}
    assert all(space.domain(key).holds(value) for key, value in config.items())


@pytest.mark.parametrize("kind", ["random", "optuna"])
def test_the_same_seed_proposes_the_same_and_another_others(kind: str) -> None:
    one = proposed(kind, SPACE, 0, 15)
    assert proposed(kind, SPACE, 0, 15) == one
    other = proposed(kind, SPACE, 1, 15)
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert len({config["optim.lr"] for config in one}) == 15, "and no two are the same"


@pytest.mark.parametrize("kind", ["random", "optuna"])
def test_a_new_proposer_goes_on_as_the_old_one_would_have(kind: str) -> None:
    whole = proposed(kind, SPACE, 3, 14)
    trials = {number: made(number, [float(number % 5)], "done", whole[number]) for number in range(13)}
    assert build_proposer(kind, SPACE, [LOSS], 3, 40).propose(13, trials) == whole[13]


@pytest.mark.parametrize("kind", ["random", "optuna"])
def test_conditions_and_domains_are_respected(kind: str) -> None:
    found = proposed(kind, SPACE, 0, 25)
    for config in found:
        check(SPACE, config)
    assert {config["optim.name"] for config in found} == {"adamw", "sgd"}
    assert all(type(config["model.layers"]) is int for config in found)


@settings(max_examples=50)
@given(space=spaces(), seed=st.integers(0, 2**32 - 1), number=st.integers(0, 10_000))
def test_random_proposals_fit_any_space(space: Space, seed: int, number: int) -> None:
    check(space, build_proposer("random", space, [LOSS], seed, 16).propose(number, {}))


@settings(max_examples=15)
@given(space=spaces(), seed=st.integers(0, 2**32 - 1))
def test_optunas_proposals_fit_any_space(space: Space, seed: int) -> None:
    for config in proposed("optuna", space, seed, 5, num_trials=6):
        check(space, config)


def test_random_proposals_depend_on_no_trial() -> None:
    proposer = build_proposer("random", SPACE, [LOSS], 0, 16)
    assert proposer.propose(5, {}) == proposer.propose(5, {0: made(0, [1.0], "failed", {"optim.lr": 0.1})})


def test_random_proposals_cover_a_range() -> None:
    found = proposed("random", SPACE, 0, 400)
    exponents = Counter(math.floor(math.log10(config["optim.lr"])) for config in found)
    assert set(exponents) == {-5, -4, -3, -2} and min(exponents.values()) > 70
    layers = Counter(config["model.layers"] for config in found)
    assert set(layers) == {1, 2, 3, 4} and min(layers.values()) > 70


def test_fields_of_a_grid_go_round_in_turn() -> None:
    space = parse_space({"a.a": "grid(1, 2)", "a.b": "uniform(0, 1)", "a.c": "grid(x, y, z)", "a.d": "choice(1, 2)"})
    found = [(config["a.a"], config["a.c"]) for config in proposed("random", space, 0, 12)]
    assert found == [(1, "x"), (1, "y"), (1, "z"), (2, "x"), (2, "y"), (2, "z")] * 2


def test_a_grid_of_many_fields_costs_nothing() -> None:
    space = parse_space({f"a.x{i}": "grid(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)" for i in range(30)})
    found = proposed("random", space, 0, 11)
    assert [config["a.x29"] for config in found] == [*range(10), 0] and found[10]["a.x28"] == 1


@st.composite
def grids(draw: st.DrawFn) -> Space:
    settings = [setting for setting in draw(spaces()) if isinstance(setting.domain, Options)]
    there = {setting.key for setting in settings}
    return Space(tuple(s for s in settings if s.condition is None or s.condition.key in there))


@settings(max_examples=50)
@given(space=grids())
def test_a_grid_is_gone_through_point_by_point(space: Space) -> None:
    points = space.grid()
    proposer = build_proposer("grid", space, [LOSS], 0, len(points))
    found = [proposer.propose(number, {}) for number in range(len(points))]
    for config in found:
        check(space, config)
    keys = [repr(sorted((key, repr(value)) for key, value in config.items())) for config in found]
    assert len(set(keys)) == len(keys), "no point twice"
    # As many as there are ways to fill the open fields one after the other.
    assert len(found) == ways(space, {})


def ways(space: Space, config: Config) -> int:
    following = next((s for s in space.open_settings(config) if s.key not in config), None)
    if following is None:
        return 1
    return sum(ways(space, config | {following.key: value}) for value in following.domain.extremes())


@pytest.mark.parametrize("kind", ["random", "optuna"])
def test_points_to_try_first_come_first_and_are_filled(kind: str) -> None:
    first: list[Config] = [{"optim.lr": 3e-4, "optim.name": "sgd"}, {"optim.name": "adamw", "model.hidden": [64]}, {}]
    space = parse_space(TREE | {"first": first})
    found = proposed(kind, space, 0, 6)
    for config in found:
        check(space, config)
    for config, point in zip(found, first, strict=False):
        assert {key: config[key] for key in point} == point
    assert "optim.momentum" in found[0] and found[3]["optim.lr"] != 3e-4
    assert proposed(kind, space, 0, 6) == found and proposed(kind, space, 1, 6)[0] != found[0]


def test_a_field_of_a_first_point_waits_for_its_condition() -> None:
    space = parse_space(TREE | {"first": [{"optim.momentum": 0.9}]})
    for seed in range(10):
        [config] = proposed("random", space, seed, 1)
        assert config.get("optim.momentum", 0.9) == 0.9 and ("optim.momentum" in config) is (
            config["optim.name"] == "sgd"
        )
