import time

import pytest

from shoal.observe.clock import Clock


def test_every_second_is_booked_to_one_phase() -> None:
    clock = Clock()
    for phase, seconds in (("data", 0.02), ("forward", 0.05), ("data", 0.02)):
        time.sleep(seconds)
        clock.lap(phase)
    elapsed = clock.elapsed_s
    assert set(clock.total_s) == {"data", "forward"}
    assert clock.total_s["data"] >= 0.04 and clock.total_s["forward"] >= 0.05
    assert sum(clock.total_s.values()) == pytest.approx(elapsed, abs=0.005)


def test_what_is_reported_is_what_came_since_the_last_report() -> None:
    clock = Clock()
    time.sleep(0.01)
    clock.lap("data")
    first = clock.since_report()
    assert first == clock.total_s
    time.sleep(0.01)
    clock.lap("forward")
    second = clock.since_report()
    assert set(second) == {"forward"}, "a phase without new seconds is left out"
    assert clock.since_report() == {}
    time.sleep(0.01)
    clock.lap("data")
    third = clock.since_report()
    assert first["data"] + third["data"] == pytest.approx(clock.total_s["data"])


@pytest.mark.parametrize(("phase", "waited_as"), [("backward", "comm"), ("data", "comm"), ("evaluate", "evaluate")])
def test_waiting_for_others_in_a_step_is_communication_and_elsewhere_part_of_what_is_done(
    phase: str, waited_as: str
) -> None:
    clock = Clock()
    time.sleep(0.02)
    for _ in range(2):
        clock.begin_wait()
        time.sleep(0.03)
        clock.end_wait()
        time.sleep(0.01)
    clock.lap(phase)
    assert sum(clock.total_s.values()) == pytest.approx(clock.elapsed_s, abs=0.005)
    if waited_as == phase:
        assert set(clock.total_s) == {phase}
    else:
        assert clock.total_s[waited_as] == pytest.approx(0.06, abs=0.02)
        assert clock.total_s[phase] == pytest.approx(0.04, abs=0.02)
    clock.lap("optimizer")
    assert clock.total_s["optimizer"] < 0.01, "a wait is booked once"


@pytest.mark.parametrize("phase", ["forward", "evaluate"])
def test_compiling_is_a_phase_of_its_own_wherever_it_is_needed(phase: str) -> None:
    clock = Clock()
    time.sleep(0.01)
    clock.begin_compile()
    time.sleep(0.05)
    clock.end_compile()
    clock.lap(phase)
    clock.lap("report")
    assert clock.total_s["compile"] >= 0.05
    assert 0.01 <= clock.total_s[phase] < 0.05
    assert sum(clock.total_s.values()) == pytest.approx(clock.elapsed_s, abs=0.02)


def test_a_step_may_be_timed_as_a_whole() -> None:
    clock = Clock(is_split=False)
    clock.lap_within("forward")
    clock.lap("backward")
    clock.lap("optimizer")
    assert set(clock.total_s) == {"forward_backward", "optimizer"}


class FakeDevice:
    """A device that is told what to do and does it later: time goes on only when somebody says so."""

    def __init__(self) -> None:
        self.done = 0.0
        self.told = 0.0
        self.in_use = 0

    def compute(self, seconds: float) -> None:
        self.told += seconds

    def mark(self) -> float:
        self.in_use += 1
        return self.told

    def is_reached(self, mark: float) -> bool:
        return mark <= self.done

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def let_go(self, mark: float) -> None:
        self.in_use -= 1

    def wait(self) -> None:
        self.done = self.told


class BrokenDevice(FakeDevice):
    """One that has failed, and says so to whoever asks."""

    def wait(self) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_device_that_has_failed_does_not_keep_the_end_of_a_run_from_being_told() -> None:
    device = BrokenDevice()
    clock = Clock(device)
    device.compute(1.0)
    clock.lap("forward")
    device.done = 1.0
    clock.settle()
    clock.lap("backward")
    clock.finish()
    assert clock.since_report() == {"forward": 1.0}
    clock.lap("end")
    clock.finish()


def test_marks_do_not_pile_up_where_reports_are_far_apart() -> None:
    device = FakeDevice()
    clock = Clock(device)
    for _ in range(5000):
        device.compute(0.001)
        device.wait()
        clock.lap("forward")
    assert device.in_use < 1100


def test_with_a_device_the_phases_are_those_of_the_device() -> None:
    device = FakeDevice()
    clock = Clock(device)
    for _ in range(3):
        clock.lap("data")
        device.compute(2.0)
        clock.lap("forward")
        device.compute(3.0)
        clock.begin_wait()
        device.compute(1.0)
        clock.end_wait()
        device.compute(0.5)
        clock.lap("backward")
    assert clock.since_report() == {}, "nothing is waited for"
    device.done = 2.0
    assert clock.since_report() == {"forward": 2.0}
    clock.finish()
    assert clock.total_s == {"data": 0.0, "forward": 6.0, "backward": 10.5, "comm": 3.0}
    assert clock.since_report() == {"forward": 4.0, "backward": 10.5, "comm": 3.0}
    assert sum(clock.host_s.values()) < 1.0, "the host did next to nothing"
    assert device.in_use == 1, "all but the last are used again"
