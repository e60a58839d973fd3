"""Time left: from steps of late, with what is done now and then, and honest about what is not known."""

import pytest

from shoal.observe.monitor.estimate import Habit, Pace, left_s, step_s

STEADY = [Pace(float(n), 10, {"forward": 0.6, "data": 0.4}) for n in range(6)]


def test_steps_of_late_are_taken_on() -> None:
    assert left_s(100, STEADY, {}) == pytest.approx(10.0)
    assert left_s(0, STEADY, {}) == 0.0


def test_nothing_is_said_before_there_are_steps() -> None:
    assert left_s(100, [], {}) is None
    assert left_s(100, [Pace(0.0, 0, {"evaluate": 3.0})], {}) is None


def test_the_first_report_of_a_start_is_left_out_once_there_are_others() -> None:
    warming = Pace(0.0, 1, {"start": 9.0, "forward": 30.0})
    assert left_s(100, [warming, *STEADY], {}) == pytest.approx(10.0)
    assert left_s(100, [warming], {}) == pytest.approx(3000.0)


def test_evaluations_and_saves_count_by_how_often_they_were() -> None:
    paces = [*STEADY, Pace(7.0, 0, {"evaluate": 5.0})]
    habits = {"evaluate": Habit(seconds=15.0, last_step=300), "checkpoint": Habit(seconds=3.0, last_step=300)}
    assert step_s(paces, habits) == pytest.approx(0.1 + 0.05 + 0.01)
    # The last minute may hold none of it:
    assert left_s(1000, STEADY, habits) == pytest.approx(160.0)
    # or little else: what it held is not taken for the rule.
    assert left_s(1000, [*STEADY, *[Pace(8.0, 0, {"evaluate": 5.0})] * 9], habits) == pytest.approx(160.0)


def test_time_goes_on_between_reports_but_not_for_ever() -> None:
    assert left_s(100, STEADY, {}, since_report_s=0.5) == pytest.approx(9.5)
    assert left_s(100, STEADY, {}, since_report_s=1000.0) == pytest.approx(9.0)
    assert left_s(100, STEADY, {}, since_report_s=-50.0) == pytest.approx(10.0)
