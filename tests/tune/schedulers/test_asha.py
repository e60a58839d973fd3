"""ASHA on made-up trials: who goes on from a rung, and what holds whoever comes first."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.tune.schedulers.asha import Asha, rungs
from shoal.tune.trial import Objective, Trial
from tests.tune.made_trials import ACCURACY, LOSS, MadeSearch, by_number, made


@pytest.mark.parametrize(
    ("first", "length", "reduction", "found"),
    [
        (1, 27, 3, [1, 3, 9]),
        (1, 28, 3, [1, 3, 9, 27]),
        (1, 10, 2, [1, 2, 4, 8]),
        (2, 9, 4, [2, 8]),
        (0.5, 2, 2, [0.5, 1]),
        (1, 1, 3, []),
        (5, 5, 2, []),
        (20, 400, 3, [20, 60, 180]),
    ],
)
def test_rungs_grow_and_end_before_the_end(first: float, length: float, reduction: int, found: list[float]) -> None:
    assert rungs(first, length, reduction) == found


def verdict(own: list[float | None], others: list[list[float | None]], objective: Objective = LOSS) -> str | None:
    trial = made(0, own, objective=objective)
    rest = [made(number, values, objective=objective) for number, values in enumerate(others, 1)]
    return Asha(objective, 9.0, 1.0, 3).verdict(trial, by_number(trial, *rest))


@pytest.mark.parametrize(
    ("own", "others", "words"),
    [
        ([5.0], [], None),  # the first to come
        ([5.0], [[6.0]], None),
        ([5.0], [[4.0]], "place 2 of 2 at epoch 1, and 1 went on"),
        ([5.0], [[4.0], [6.0], [7.0]], "place 2 of 4 at epoch 1, and 1 went on"),
        ([5.0], [[4.0], [6.0], [7.0], [8.0], [9.0]], None),  # 2 of 6
        ([5.0], [[4.0], [4.5], [7.0], [8.0], [9.0]], "place 3 of 6 at epoch 1, and 2 went on"),
        ([5.0], [[]], None),  # another that has not come so far
        ([5.0], [[5.0], [5.0]], None),  # equals
        ([1.0, 5.0], [[0.0, 0.0], [0.0, 0.0]], None),  # no rung
        ([9.0, 9.0, 2.0], [[1.0, 1.0, 3.0]], None),  # only what it is here counts
        ([1.0, 1.0, 5.0], [[2.0, 2.0, 3.0], [3.0]], "place 2 of 2 at epoch 3, and 1 went on"),
        ([1.0] * 9, [[0.0] * 9] * 3, None),  # the end
        ([None], [], "val_loss is no number at epoch 1"),
        ([math.nan], [[1e9]], "val_loss is no number at epoch 1"),
        ([-math.inf], [[1e9]], "val_loss is no number at epoch 1"),
        ([5.0], [[None], [math.nan]], None),
    ],
)
def test_who_goes_on_from_a_rung(own: list[float | None], others: list[list[float | None]], words: str | None) -> None:
    assert verdict(own, others) == words
    words = None if words is None else words.replace("val_loss", "val_accuracy")
    mirrored = [[None if v is None else -v for v in values] for values in others]
    assert verdict([None if v is None else -v for v in own], mirrored, ACCURACY) == words, "and where more is better"


def test_an_evaluation_that_is_late_counts_for_the_rungs_before_it() -> None:
    late = made(0, [None, None, None, 5.0])
    late.results = late.results[3:]  # evaluated at 4 for the first time
    worse = by_number(late, made(1, [9.0, 9.0, 9.0, 9.0]))
    assert Asha(LOSS, 9.0, 1.0, 3).verdict(late, worse) is None
    better_at_first = by_number(late, made(1, [1.0]))
    assert Asha(LOSS, 9.0, 1.0, 3).verdict(late, better_at_first) == "place 2 of 2 at epoch 1, and 1 went on"


def test_nothing_is_paused() -> None:
    scheduler = Asha(LOSS, 9.0, 1.0, 3)
    assert scheduler.until(made(0, [1.0])) is None
    assert scheduler.moves(by_number(made(0, [1.0], "paused")), expects_more=False) == []


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 12),
    reduction=st.integers(2, 4),
    objective=st.sampled_from([LOSS, ACCURACY]),
    odd=st.sets(st.integers(1, 29), max_size=10),
)
def test_whatever_the_order_the_best_comes_through_and_most_is_saved(
    seed: int, slots: int, reduction: int, objective: Objective, odd: set[int]
) -> None:
    count, length = 30, 27
    best = seed % count
    sign = 1 if objective.is_less_better else -1

    def value_of(trial: Trial, progress: float) -> float | None:
        if trial.number in odd and trial.number != best:
            return None if trial.number % 2 else math.nan
        return sign * ((trial.number - best) % count + 1 / progress)

    search = MadeSearch(Asha(objective, length, 1.0, reduction), count, length, value_of, slots=slots, seed=seed)
    search.objective = objective
    trials = search.run()
    assert all(trial.status in ("done", "stopped") for trial in trials.values())
    assert trials[best].status == "done", "who is best at every rung is never stopped"
    assert all(
        "went on" in trial.reason or "is no number" in trial.reason
        for trial in trials.values()
        if trial.status == "stopped"
    )
    done = [trial for trial in trials.values() if trial.status == "done"]
    assert all(trial.progress == length for trial in done)


def test_most_of_the_budget_is_saved_on_average() -> None:
    made_in_all = 0.0
    for seed in range(20):
        places = random.Random(seed).sample(range(40), 40)

        def value_of(trial: Trial, progress: float, places: list[int] = places) -> float:
            return places[trial.number] + 1 / progress

        search = MadeSearch(Asha(LOSS, 27.0, 1.0, 3), 40, 27, value_of, seed=seed)
        search.run()
        made_in_all += search.made
    assert made_in_all / 20 < 0.35 * 40 * 27
