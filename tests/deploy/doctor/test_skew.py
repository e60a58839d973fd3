"""Clocks that are apart."""

import time

import pytest

from shoal.deploy.doctor.skew import Offset, RoundTrip, ask_clock, judge_skew, offset_of


def test_the_fastest_round_trip_counts() -> None:
    trips = [RoundTrip(100.0, 107.0, 102.0), RoundTrip(200.0, 205.01, 200.02), RoundTrip(300.0, 306.0, 301.0)]
    offset = offset_of(trips)
    assert offset.seconds == pytest.approx(5.0) and offset.uncertain_s == pytest.approx(0.01)


def test_a_clock_that_is_ahead_is_measured_whatever_the_way_takes() -> None:
    def ask() -> float:
        time.sleep(0.01)
        told = time.time() + 3.0
        time.sleep(0.002)
        return told

    offset = offset_of(ask_clock(ask, times=3))
    assert abs(offset.seconds - 3.0) <= offset.uncertain_s < 0.1


@pytest.mark.parametrize(
    ("offsets", "level", "words"),
    [
        ([0.0, 0.01, -0.02], "pass", "30.0 ms apart"),
        ([0.0, 0.0, 2.0], "warn", "node2 is 2 s ahead"),
        ([0.0, -40.0, 0.0], "fail", "node1 is 40 s behind"),
        ([90.0, 90.1, 90.0], "pass", ""),  # it is the asker who is wrong
    ],
)
def test_skew(offsets: list[float], level: str, words: str) -> None:
    finding = judge_skew({f"node{number}": Offset(seconds, 0.001) for number, seconds in enumerate(offsets)})
    assert finding.level == level and words in finding.found and "±1.0 ms" in finding.found


def test_what_is_not_certain_is_no_fault() -> None:
    assert judge_skew({"a": Offset(0.0, 0.001), "b": Offset(0.0, 0.001), "c": Offset(0.8, 0.5)}).level == "pass"
    assert judge_skew({"a": Offset(0.0, 0.0)}).level == "skip"
