"""The median rule, as a table."""

import math

import pytest

from shoal.tune.schedulers.median import Median
from shoal.tune.trial import Objective, Trial
from tests.tune.made_trials import ACCURACY, LOSS, MadeSearch, by_number, made


def verdict(
    own: list[float | None], others: list[list[float | None]], objective: Objective, grace: float
) -> str | None:
    trial = made(9, own, objective=objective)
    rest = [made(number, values, "done", objective=objective) for number, values in enumerate(others)]
    return Median(objective, grace).verdict(trial, by_number(trial, *rest))


@pytest.mark.parametrize(
    ("own", "others", "stops"),
    [
        ([5.0], [[1.0], [2.0], [3.0]], True),
        ([2.0], [[1.0], [2.0], [3.0]], False),  # the median itself
        ([2.1], [[1.0], [2.0], [3.0]], True),
        ([5.0], [[1.0], [2.0]], False),  # too few to compare with
        ([5.0], [], False),
        ([9.0, 1.5], [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], False),  # its best counts
        ([1.5, 9.0], [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], False),
        ([9.0, 5.0], [[9.0, 1.0], [9.0, 2.0], [9.0, 3.0]], False),  # and the others' averages: 5, 5.5, 6
        ([9.0, 5.6], [[9.0, 1.0], [9.0, 2.0], [9.0, 3.0]], True),
        ([9.0, 9.0], [[1.0], [2.0], [3.0, 3.0]], False),  # only who has come so far
        ([5.0], [[1.0, 99.0], [2.0, 99.0], [3.0, 99.0]], True),  # and only by then
        ([5.0], [[None], [math.nan], [1.0], [2.0]], False),  # what is no number is no company
        ([None], [[1.0], [2.0], [3.0]], True),
        ([math.nan], [[1.0], [2.0], [3.0]], True),
    ],
)
def test_who_is_worse_than_most_were_is_stopped(
    own: list[float | None], others: list[list[float | None]], stops: bool
) -> None:
    assert (verdict(own, others, LOSS, 1.0) is not None) is stops
    mirrored = [[None if v is None else -v for v in values] for values in others]
    assert (verdict([None if v is None else -v for v in own], mirrored, ACCURACY, 1.0) is not None) is stops


def test_nobody_is_stopped_before_its_time() -> None:
    others: list[list[float | None]] = [[1.0] * 4, [2.0] * 4, [3.0] * 4]
    stopped = [verdict([5.0] * epochs, others, LOSS, 3.0) is not None for epochs in (1, 2, 3, 4)]
    assert stopped == [False, False, True, True]


def test_why_is_told_in_numbers_of_the_metric() -> None:
    others: list[list[float | None]] = [[0.8], [0.9], [0.7]]
    words = "its best at epoch 1 is 0.5, and the median of 3 others is 0.8"
    assert verdict([0.5], others, ACCURACY, 1.0) == words
    assert verdict([0.9], [[0.8], [0.85], [0.7]], LOSS, 1.0) == words.replace("0.5", "0.9")


def test_nothing_is_paused() -> None:
    scheduler = Median(LOSS, 1.0)
    assert scheduler.until(made(0, [1.0])) is None
    assert scheduler.moves(by_number(made(0, [1.0], "paused")), expects_more=False) == []


@pytest.mark.parametrize("seed", range(10))
def test_the_best_is_never_stopped_and_some_are(seed: int) -> None:
    def value_of(trial: Trial, progress: float) -> float:
        return (trial.number - seed) % 12 + 1 / progress

    trials = MadeSearch(Median(LOSS, 2.0), 12, 10, value_of, slots=4, seed=seed).run()
    assert trials[seed].status == "done"
    assert 2 <= sum(trial.status == "stopped" for trial in trials.values()) < 12
    assert all(trial.progress >= 2 for trial in trials.values())
