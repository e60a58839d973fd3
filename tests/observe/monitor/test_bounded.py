"""Runs of any length in bounded memory: curves, and reports for the ledger."""

import pytest

from shoal.observe.ledger import make_ledger
from shoal.observe.monitor.blocks import Blocks
from shoal.observe.monitor.curve import Curve


def test_a_short_curve_is_kept_as_it_is() -> None:
    curve = Curve()
    for step in range(500):
        curve.add(step, step * 2.0)
    assert curve.points() == [(step, step * 2.0) for step in range(500)]


@pytest.mark.parametrize("length", [1023, 1024, 1025, 30_001])
def test_a_long_curve_keeps_its_course_and_its_ends(length: int) -> None:
    curve = Curve()
    for step in range(length):
        curve.add(step, 3.0 * step)
    points = curve.points()
    assert len(points) <= 1025
    assert all(value == pytest.approx(3.0 * step) for step, value in points)
    assert points[0][0] < length / 500 and points[-1][0] > length * 0.99
    assert curve.last == (length - 1, 3.0 * (length - 1)) and curve.lowest == (0, 0.0) and curve.highest == curve.last


def test_points_are_by_step_when_neighbours_are_joined() -> None:
    curve = Curve()
    for step in range(5000):
        curve.add(step, 0.0)
    steps = [step for step, _ in curve.points()]
    assert steps == sorted(steps)


def test_a_ledger_of_joined_reports_is_that_of_all() -> None:
    events = [{"time": 0.0, "event": "start", "asked": 0.0, "clock": 0.0, "world_size": 2, "step": 0, "num_steps": 1}]
    blocks, reports = Blocks(), []
    for step in range(1, 10_001):
        seconds = {"forward": 0.6, "data": 0.3} | ({"evaluate": 0.1} if step % 100 == 0 else {})
        blocks.add(float(step), step, seconds)
        reports.append({"time": float(step), "step": step, "seconds": seconds})
    assert len(blocks.reports()) <= 2049
    joined, whole = make_ledger(events, blocks.reports()), make_ledger(events, reports)
    assert joined.worker_s == whole.worker_s
    assert joined.seconds == pytest.approx(whole.seconds)
