"""The kernel's clock."""

import pytest

from shoal.deploy.doctor.clock import Clock, judge_clock, look_at_clock


@pytest.mark.parametrize(
    ("clock", "level"),
    [
        (Clock(True, 0.01), "pass"),
        (Clock(True, 7.0), "warn"),
        (Clock(False, 16.0), "warn"),
        ("the kernel does not tell (the container may not ask)", "skip"),
    ],
)
def test_clock(clock: Clock | str, level: str) -> None:
    finding = judge_clock(clock)
    assert finding.level == level and bool(finding.advice) == (level == "warn")


def test_this_machine() -> None:
    found = look_at_clock()
    assert isinstance(found, str) or found.error_s >= 0
