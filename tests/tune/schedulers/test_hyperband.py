"""Hyperband on made-up trials: its brackets, and that nothing depends on who is faster."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.tune.schedulers.hyperband import Hyperband
from shoal.tune.schedulers.moves import Go, Stop
from shoal.tune.trial import Objective, Result, Trial
from tests.tune.made_trials import ACCURACY, LOSS, MadeSearch, by_number, made


@pytest.mark.parametrize(
    ("length", "grace", "reduction", "sizes"),
    [
        (81, 1, 3, [81, 34, 15, 8, 5]),  # the table of the paper
        (27, 1, 3, [27, 12, 6, 4]),
        (9, 1, 3, [9, 5, 3]),
        (15, 1, 3, [9, 5, 3]),
        (16, 1, 4, [16, 6, 3]),
        (8, 1, 2, [8, 6, 4, 4]),
        (10, 10, 3, [1]),
        (10, 4, 3, [1]),
        (243, 1, 3, [243, 98, 41, 18, 9, 6]),  # log(243, 3) is 4.999...
    ],
)
def test_brackets_are_as_the_paper_has_them(length: float, grace: float, reduction: int, sizes: list[int]) -> None:
    shapes = Hyperband(LOSS, length, grace, reduction).shapes
    assert [shape.size for shape in shapes] == sizes
    for halvings, shape in zip(range(len(sizes) - 1, -1, -1), shapes, strict=True):
        assert len(shape.rungs) == halvings and all(grace - 1e-9 <= rung < length for rung in shape.rungs)
        assert all(b == pytest.approx(a * reduction) for a, b in zip(shape.rungs, shape.rungs[1:], strict=False))
        assert not shape.rungs or shape.rungs[-1] == pytest.approx(length / reduction)


def test_trials_fill_one_bracket_after_the_other_and_then_begin_anew() -> None:
    scheduler = Hyperband(LOSS, 9.0, 1.0, 3)
    found = [scheduler.bracket(number)[0] for number in range(34)]
    assert found == [0] * 9 + [1] * 5 + [2] * 3 + [3] * 9 + [4] * 5 + [5] * 3
    assert scheduler.bracket(17)[1] == scheduler.bracket(0)[1]


@pytest.mark.parametrize(
    ("number", "epochs", "until"),
    [(0, 0, 1), (0, 1, 3), (0, 2, 3), (0, 3, None), (9, 0, 3), (9, 3, None), (14, 0, None), (17, 0, 1)],
)
def test_a_trial_pauses_at_the_next_rung_of_its_bracket(number: int, epochs: int, until: float | None) -> None:
    assert Hyperband(LOSS, 9.0, 1.0, 3).until(made(number, [1.0] * epochs)) == until
    assert Hyperband(LOSS, 9.0, 1.0, 3).verdict(made(number, [1.0] * epochs), {}) is None


def paused(values: list[float | None], objective: Objective = LOSS) -> dict[int, Trial]:
    return by_number(*(made(number, [value], "paused", objective=objective) for number, value in enumerate(values)))


@pytest.mark.parametrize("objective", [LOSS, ACCURACY])
def test_the_best_of_a_full_bracket_go_on(objective: Objective) -> None:
    sign = 1.0 if objective.is_less_better else -1.0
    values = (5.0, 3.0, 9.0, 1.0, 7.0, 2.0, 8.0, 6.0, math.nan)
    trials = paused([sign * value for value in values], objective)
    scheduler = Hyperband(objective, 9.0, 1.0, 3)
    moves = scheduler.moves(trials, expects_more=True)
    assert sorted(move.trial for move in moves if isinstance(move, Go)) == [1, 3, 5]
    reasons = {move.trial: move.reason for move in moves if isinstance(move, Stop)}
    assert (
        reasons[0] == "place 4 of 9 at epoch 1, and 3 went on"
        and reasons[8] == "place 9 of 9 at epoch 1, and 3 went on"
    )


def test_nobody_is_judged_before_all_are_there() -> None:
    scheduler = Hyperband(LOSS, 9.0, 1.0, 3)
    trials = paused([float(number) for number in range(9)])
    for status in ("running", "waiting"):
        late = {**trials, 4: made(4, [], status)}
        assert scheduler.moves(late, expects_more=True) == scheduler.moves(late, expects_more=False) == []
    few = {number: trials[number] for number in range(8)}
    assert scheduler.moves(few, expects_more=True) == [], "others will still be proposed"
    assert [type(move) for move in scheduler.moves(few, expects_more=False)] == [Go] * 2 + [Stop] * 6
    failed = {**trials, 4: made(4, [], "failed")}
    assert len(scheduler.moves(failed, expects_more=True)) == 8, "who has failed is not waited for"


def test_equals_are_told_apart_by_their_number() -> None:
    moves = Hyperband(LOSS, 9.0, 1.0, 3).moves(paused([1.0] * 9), expects_more=True)
    assert [move.trial for move in moves if isinstance(move, Go)] == [0, 1, 2]


def outcome(search: MadeSearch) -> list[Any]:
    return [(trial.status, trial.reason, trial.results) for trial in search.run().values()]


def values(seed: int) -> Callable[[Trial, float], float | None]:
    def value_of(trial: Trial, progress: float) -> float | None:
        mixed = (trial.number * 7919 + seed * 31 + int(progress) * 13) % 101
        return None if mixed == 0 else float(mixed) / 10

    return value_of


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    num_trials=st.integers(1, 60),
    slots=st.lists(st.integers(1, 20), min_size=2, max_size=2),
    reduction=st.integers(2, 4),
    length=st.sampled_from([8, 9, 16, 27]),
    fails=st.dictionaries(st.integers(0, 59), st.integers(1, 9), max_size=20),
)
def test_every_search_ends_and_the_order_changes_nothing(
    seed: int, num_trials: int, slots: list[int], reduction: int, length: int, fails: dict[int, float]
) -> None:
    scheduler = Hyperband(LOSS, float(length), 1.0, reduction)
    searches = [
        MadeSearch(scheduler, num_trials, length, values(seed), fails=fails, slots=places, seed=seed + index)
        for index, places in enumerate(slots)
    ]
    one, other = map(outcome, searches)
    assert one == other
    assert len(one) == num_trials and all(status in ("done", "stopped", "failed") for status, _, _ in one)
    if len(fails) < num_trials:
        brackets: dict[int, set[str]] = {}
        for trial in searches[0].trials.values():
            brackets.setdefault(scheduler.bracket(trial.number)[0], set()).add(trial.status)
        assert all("done" in found or found <= {"failed", "stopped"} for found in brackets.values())


def test_all_of_a_bracket_may_fail() -> None:
    search = MadeSearch(Hyperband(LOSS, 9.0, 1.0, 3), 17, 9, values(0), fails=dict.fromkeys(range(9), 1))
    assert [trial.status for trial in search.run().values()][:9] == ["failed"] * 9
    assert all(trial.is_ended for trial in search.trials.values())


def test_who_overshoots_a_rung_is_compared_all_the_same() -> None:
    """Where batches do not divide an epoch, a trial pauses a little later than another."""
    search = MadeSearch(Hyperband(LOSS, 9.0, 1.0, 3), 17, 9, values(3), overshoot=lambda number: number % 5 / 100)
    assert all(trial.is_ended for trial in search.run().values())
    assert "done" in {search.trials[number].status for number in range(9)}
    assert all("of 9 at epoch 1" in t.reason for t in search.trials.values() if t.number < 9 and round(t.progress) == 1)


def test_rungs_closer_than_evaluations_hold_up_nobody() -> None:
    search = MadeSearch(Hyperband(LOSS, 9.0, 0.1, 3), 60, 9, values(1), slots=5)
    assert all(trial.is_ended for trial in search.run().values())


def test_a_search_that_is_given_more_trials_goes_on() -> None:
    scheduler = Hyperband(LOSS, 9.0, 1.0, 3)
    search = MadeSearch(scheduler, 6, 9, values(0))
    search.run()
    search.num_trials = 20
    assert all(trial.is_ended for trial in search.run().values()) and len(search.trials) == 20


def test_a_rung_that_no_report_meets_to_the_last_digit_is_reached() -> None:
    scheduler = Hyperband(LOSS, 16.0, 1.0, 3)  # rungs at 16/9 and 16/3
    trials = paused([float(number) for number in range(9)])
    for trial in trials.values():
        trial.results = [Result(16, 1.777777, trial.results[0].metrics)]  # as it is rounded
    assert [move.trial for move in scheduler.moves(trials, expects_more=True) if isinstance(move, Go)] == [0, 1, 2]
    assert scheduler.until(trials[0]) == pytest.approx(16 / 3)
