from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.ledger import CATEGORIES, LABELS, make_ledger, read_ledger
from shoal.observe.phases import PHASES
from tests.made_run import RESTART_S, STEP_S, make_run


def start(
    time: float, asked: float, *, clock: float | None = None, world_size: int = 2, step: int = 0
) -> dict[str, Any]:
    return {
        **{"time": time, "event": "start", "asked": asked, "clock": time if clock is None else clock},
        **{"world_size": world_size, "step": step},
    }


def report(time: float, step: int, **seconds: float) -> dict[str, Any]:
    return {"time": time, "step": step, "metrics": {}, "seconds": seconds}


def event(time: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": name, **fields}


def booked(events: list[dict[str, Any]], reports: list[dict[str, Any]], until: float | None = None) -> dict[str, float]:
    """What is not zero, after a check that it adds up."""
    ledger = make_ledger(events, reports, until)
    assert ledger.unaccounted_s == pytest.approx(0.0, abs=1e-6), ledger
    assert tuple(ledger.seconds) == CATEGORIES == tuple(LABELS)
    return {name: seconds for name, seconds in ledger.seconds.items() if seconds}


def test_a_run_without_trouble() -> None:
    events = [
        start(105.0, 100.0, clock=104.0),
        event(106.0, "first_step", step=1),
        event(120.0, "done", step=20, seconds={"checkpoint": 1.0, "end": 0.5}),
    ]
    reports = [report(111.0, 10, start=1.5, data=0.5, forward=2.0, backward=2.0, comm=0.5, optimizer=0.5)]
    reports += [report(118.5, 20, report=0.5, data=0.5, h2d=0.5, forward=2.0, backward=2.0, evaluate=2.0)]
    assert booked(events, reports) == {
        **{"useful": 2 * 9.5, "data": 2 * 1.0, "startup": 2 * 5.5, "checkpoint": 2 * 1.0, "evaluate": 2 * 2.0},
        **{"report": 2 * 0.5, "idle": 2 * 0.5},
    }


def test_compiling_is_told_apart_from_training() -> None:
    events = [start(10.0, 0.0), event(18.0, "done", step=5, seconds={})]
    found = booked(events, [report(18.0, 5, compile=6.0, forward=2.0)])
    assert found == {"startup": 20.0, "compile": 12.0, "useful": 4.0}


def test_what_was_lost_with_a_worker_is_booked_as_lost_and_so_is_the_time_to_start_again() -> None:
    events = [
        start(105.0, 100.0),
        event(115.0, "save", step=10),
        event(131.0, "failure", rank=1),
        event(131.0, "restart", restarts=1),
        event(141.5, "forgotten", after_step=10, to_step=20, until=125.0, seconds={"forward": 10.0}),
        start(142.0, 100.0, clock=141.0, step=10),
        event(152.0, "done", step=20, seconds={}),
    ]
    reports = [report(115.0, 10, forward=10.0), report(152.0, 20, start=1.0, forward=10.0)]
    assert booked(events, reports) == {
        "useful": 2 * 20.0,
        "recomputed": 2 * (10.0 + 6.0),  # what was reported, and what went on after that until the worker was missed
        "startup": 2 * 5.0,
        "restart": 2 * (10.0 + 1.0),
    }


def test_the_time_in_which_a_hung_run_did_nothing_is_idle() -> None:
    events = [
        start(100.0, 100.0),
        event(160.0, "hang", timeout_s=30.0),
        event(161.0, "failure"),
        event(161.0, "failed"),
    ]
    assert booked(events, [report(110.0, 10, forward=10.0)]) == {"recomputed": 2 * (10.0 + 21.0), "idle": 2 * 30.0}


def test_a_run_that_failed_has_lost_what_came_after_its_last_checkpoint() -> None:
    events = [
        start(100.0, 100.0, world_size=1),
        event(110.0, "save", step=10),
        event(125.0, "failed", step=25, seconds={"forward": 5.0}),
    ]
    reports = [report(110.0, 10, forward=10.0), report(120.0, 20, forward=10.0)]
    assert booked(events, reports) == {"useful": 10.0, "recomputed": 15.0}


def test_a_change_of_size_counts_the_workers_that_there_were() -> None:
    events = [
        start(100.0, 100.0, world_size=4),
        event(110.0, "interrupted", step=10, seconds={"checkpoint": 1.0}),
        event(112.0, "resize", **{"from": 4, "to": 2}),
        start(115.0, 100.0, world_size=2, step=10),
        event(125.0, "done", seconds={}),
    ]
    reports = [report(109.0, 10, forward=9.0), report(125.0, 20, forward=10.0)]
    assert booked(events, reports) == {"useful": 36.0 + 20.0, "checkpoint": 4.0, "restart": 2 * 5.0}


def test_the_time_between_two_sessions_is_nobodys() -> None:
    events = [
        start(105.0, 100.0, world_size=1),
        event(115.0, "interrupted", step=10, seconds={}),
        event(9002.0, "resume", step=10),
        start(9003.0, 9000.0, world_size=1, step=10),
        event(9013.0, "done", seconds={}),
    ]
    reports = [report(115.0, 10, forward=10.0), report(9013.0, 20, forward=10.0)]
    assert booked(events, reports) == {"useful": 20.0, "startup": 8.0}


def test_a_run_of_an_earlier_version_that_was_resumed_the_next_day() -> None:
    old = [
        event(100.0, "start", world_size=4),
        event(200.0, "interrupted", step=10),
        event(90_000.0, "start", world_size=4, step=10),
        event(90_100.0, "done"),
    ]
    ledger = make_ledger(old, [])
    assert ledger.worker_s == 800.0 and ledger.seconds["restart"] == 0.0


def test_a_launcher_whose_clock_is_ahead_makes_no_time() -> None:
    """Rank 0 announces a start before the launcher, by its own clock, has lost the one before."""
    events = [
        start(100.0, 100.0),
        event(160.0, "failure"),
        event(160.0, "restart"),
        start(120.0, 100.0, clock=119.0),
        event(180.0, "done", seconds={}),
    ]
    ledger = make_ledger(events, [report(180.0, 10, forward=60.0)])
    assert ledger.unaccounted_s > -0.01 * ledger.worker_s


def test_workers_that_go_on_where_the_clock_is_behind() -> None:
    """On one machine, then with one worker more on another; reports of both, whose times are out of order."""
    events = [
        start(1000.0, 1000.0, world_size=1),
        event(1010.0, "save", step=10),
        event(1010.0, "resize"),
        start(700.0, 1000.0, step=10),
        event(710.0, "done", step=20, seconds={}),
    ]
    reports = [report(1010.0, 10, forward=10.0), report(710.0, 20, forward=10.0)]
    ledger = make_ledger(events, reports)
    assert ledger.seconds["useful"] == 10.0 + 2 * 10.0 and ledger.goodput == 1.0


def test_a_run_that_vanished_with_its_launcher_ends_with_its_last_sign_of_life() -> None:
    events = [
        start(105.0, 100.0, world_size=1),
        event(115.0, "save", step=10),
        event(9001.0, "forgotten", after_step=10, to_step=20, until=125.0, seconds={"forward": 10.0}),
        event(9002.0, "resume", step=10),
        start(9003.0, 9000.0, world_size=1, step=10),
        event(9013.0, "done", seconds={}),
    ]
    reports = [report(115.0, 10, forward=10.0), report(9013.0, 20, forward=10.0)]
    assert booked(events, reports) == {"useful": 20.0, "recomputed": 10.0, "startup": 8.0}


def test_a_run_that_goes_on_is_told_as_far_as_it_reported() -> None:
    events = [start(105.0, 100.0), event(106.0, "first_step", step=1)]
    assert booked(events, [report(115.0, 10, forward=10.0)]) == {"useful": 20.0, "startup": 10.0}
    ledger = make_ledger(events, [report(115.0, 10, forward=10.0)], until=116.0)
    assert ledger.unaccounted_s == pytest.approx(2.0) and ledger.goodput == pytest.approx(20 / 32)


def test_money(tmp_path: Path) -> None:
    ledger = read_ledger(make_run(tmp_path / "run"))
    cost = ledger.cost(7.2)
    assert cost["total"] == pytest.approx(ledger.worker_s * 0.002)
    assert sum(money for name, money in cost.items() if name != "total") == pytest.approx(cost["total"], rel=0.01)


def test_the_folder_of_a_run_that_lost_a_worker(tmp_path: Path) -> None:
    ledger = read_ledger(make_run(tmp_path / "run", steps=400, fails_at=250))
    assert abs(ledger.unaccounted_s) < 0.01 * ledger.worker_s
    assert ledger.seconds["recomputed"] == pytest.approx(2 * 50 * STEP_S)
    assert ledger.seconds["restart"] == pytest.approx(2 * RESTART_S, rel=1e-3)
    assert ledger.goodput == pytest.approx(0.8 * 400 * STEP_S / (5 + 450 * STEP_S + RESTART_S), rel=0.01)
    record = ledger.to_record()
    assert record["goodput"] == pytest.approx(ledger.goodput, abs=1e-4)
    assert sum(record["seconds"].values()) + record["unaccounted_s"] == pytest.approx(record["worker_s"], abs=0.01)


def test_folders_that_are_empty_old_or_broken(tmp_path: Path) -> None:
    assert read_ledger(tmp_path).worker_s == 0.0 and read_ledger(tmp_path).goodput == 0.0
    old = [event(100.0, "start", world_size=1), event(110.0, "done")]
    assert make_ledger(old, [{"step": 1, "metrics": {}, "seconds": {"data": 1.0}}]).worker_s == 10.0
    odd = [event(100.0, "start", world_size="many", asked="now", clock=None, step=10**400), event(110.0, "forgotten")]
    assert make_ledger(odd, [{"time": 105.0, "step": 1, "metrics": {}, "seconds": {"data": "x", "forward": None}}])


_names = st.sampled_from(["start", "first_step", "save", "failure", "restart", "resize", "forgotten", "done", "failed"])
_events = st.builds(
    lambda time, name, asked, size, step: event(time, name, asked=asked, clock=time, world_size=size, step=step),
    *(st.floats(0, 1e6), _names, st.sampled_from([0.0, 5.0, None]), st.integers(0, 9), st.integers(0, 100)),
)
_reports = st.builds(
    lambda time, step, seconds: report(time, step, **seconds),
    *(st.floats(0, 1e6), st.integers(0, 100), st.dictionaries(st.sampled_from(PHASES), st.floats(0, 100))),
)


@given(st.lists(_events, max_size=12), st.lists(_reports, max_size=6))
def test_any_events_and_reports_have_a_ledger(events: list[dict[str, Any]], reports: list[dict[str, Any]]) -> None:
    ledger = make_ledger(sorted(events, key=lambda e: e["time"]), reports)
    assert ledger.worker_s >= 0 and all(seconds >= 0 for seconds in ledger.seconds.values())
