import time

import pytest

from shoal.observe.clock import Clock


def test_every_second_is_booked_to_one_phase() -> None:
    clock = Clock()
    for phase, seconds in (("data", 0.02), ("step", 0.05), ("data", 0.02)):
        time.sleep(seconds)
        clock.lap(phase)
    elapsed = clock.elapsed_s
    assert set(clock.total_s) == {"data", "step"}
    assert clock.total_s["data"] >= 0.04 and clock.total_s["step"] >= 0.05
    assert sum(clock.total_s.values()) == pytest.approx(elapsed, abs=0.005)


def test_what_is_reported_is_what_came_since_the_last_report() -> None:
    clock = Clock()
    time.sleep(0.01)
    clock.lap("data")
    first = clock.since_report()
    assert first == clock.total_s
    time.sleep(0.01)
    clock.lap("step")
    second = clock.since_report()
    assert set(second) == {"step"}, "a phase without new seconds is left out"
    assert clock.since_report() == {}
    time.sleep(0.01)
    clock.lap("data")
    third = clock.since_report()
    assert first["data"] + third["data"] == pytest.approx(clock.total_s["data"])
