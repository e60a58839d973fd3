"""What workers tell each other at a report: real processes that are unlike each other."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from shoal.core.group import Group
from shoal.core.process import Process
from shoal.observe.clock import Clock
from shoal.observe.compiling import Reason, Recompiled
from shoal.observe.phases import PHASES
from shoal.observe.system import NAMES, SystemWatch
from shoal.train.vitals import Vitals
from tests.many import Ranks

MakeRanks = Callable[[int], Ranks]


def exchange(process: Process) -> dict[str, Any]:
    """Each rank computes for another time and gives other numbers."""
    clock = Clock()
    vitals = Vitals(process.group, clock, system=SystemWatch(), workers_every_s=0.0)
    time.sleep(0.05 * (process.rank + 1))
    clock.lap("forward")
    told = vitals.exchange(10.0 * process.rank, 1.0)
    clock.lap("report")
    again = vitals.exchange()
    return {
        "sums": told.sums(),
        "seconds": told.seconds,
        "line": None if told.workers is None else vars(told.workers),
        "again": again.seconds,
        "totals": vitals._in_all.seconds.tolist(),
        "own": dict(clock.total_s),
        "bottleneck": vitals.verdict().bottleneck,
    }


def test_numbers_are_added_up_and_seconds_are_the_mean_over_the_workers(ranks: MakeRanks) -> None:
    first, second, third = ranks(3)(exchange)
    assert first["sums"] == second["sums"] == third["sums"] == [30.0, 3.0]
    own = [told["own"]["forward"] for told in (first, second, third)]
    assert first["seconds"] == second["seconds"] == {"forward": pytest.approx(sum(own) / 3, abs=1e-5)}
    assert set(first["again"]) == {"report"}, "only what is new is told"
    assert first["totals"] == third["totals"]
    assert [seconds[PHASES.index("forward")] for seconds in first["totals"]] == pytest.approx(own)
    assert first["bottleneck"] == "straggler", "the third worker took three times as long as the first"


def test_rank_0_has_a_line_on_every_worker(ranks: MakeRanks) -> None:
    first, second, _ = ranks(3)(exchange)
    assert second["line"] is None
    line = first["line"]
    assert len(line["seconds"]["forward"]) == 3 and line["seconds"]["forward"][2] >= 0.15
    assert set(line["system"]) <= set(NAMES) and len(line["system"]["memory_bytes"]) == 3
    assert line["bottleneck"] == "straggler" and line["verdict"].startswith("straggler: worker 2 takes")
    assert line["over_s"] >= 0.05


def test_a_line_comes_every_so_many_seconds_and_less_often_with_many_workers() -> None:
    vitals = Vitals(Group(), Clock(), system=SystemWatch(), workers_every_s=0.2)
    assert vitals.exchange().workers is None
    time.sleep(0.25)
    line = vitals.exchange().workers
    assert line is not None and 0.2 <= line.over_s < 1.0
    assert vitals.exchange().workers is None
    many = Vitals(Group(world_size=640), Clock(), workers_every_s=10.0)
    assert many._every_s == 100.0


def test_what_a_short_run_did_is_told_at_its_end_and_of_a_long_one_no_rest() -> None:
    clock = Clock()
    vitals = Vitals(Group(), clock, system=SystemWatch(), workers_every_s=0.2)
    assert vitals.last_line() is None, "nothing was told yet"
    clock.lap("forward")
    assert vitals.exchange().workers is None
    line = vitals.last_line()
    assert line is not None and set(line.seconds) == {"forward"}
    assert line.over_s == pytest.approx(line.seconds["forward"][0], abs=1e-3)
    assert (line.system["memory_bytes"][0] or 0) > 0
    vitals.exchange()
    assert vitals.last_line() is None, "there was one"


def recompile(process: Process, times: int) -> list[str]:
    """The last rank compiles again and again, and rank 0 once."""
    clock = Clock()
    vitals = Vitals(process.group, clock, workers_every_s=1e9)
    time.sleep(0.05)
    clock.lap("forward")
    for _ in range(times if process.rank == process.world_size - 1 else 1):
        vitals.note_recompiled(Recompiled(1, 0.001, Reason("a batch of another shape", "pad")))
    before = str(vitals.verdict())
    vitals.exchange(1.0)
    return [before, str(vitals.verdict())]


def test_the_verdict_names_what_was_compiled_again_and_the_worker_that_did_so_most(ranks: MakeRanks) -> None:
    (before, after), *_ = ranks(3)(recompile, 2)
    assert "1 recompilation took 1.0 ms (a batch of another shape)" in before
    assert "2 recompilations of worker 2 took 2.0 ms" in after and "TORCH_LOGS" in after
    (_, after), *_ = ranks(3)(recompile, 1)
    assert "1 recompilation took 1.0 ms (a batch of another shape)" in after, "as all of them did"


class BrokenWatch(SystemWatch):
    def ask(self) -> dict[str, float]:
        raise OSError(24, "Too many open files")


def test_a_machine_that_cannot_be_asked_ends_no_run() -> None:
    clock = Clock()
    vitals = Vitals(Group(), clock, system=BrokenWatch(), workers_every_s=0.0)
    clock.lap("forward")
    line = vitals.exchange(1.0).workers
    assert line is not None and line.system == {} and "forward" in line.seconds


def test_without_a_watch_there_are_no_lines_and_seconds_all_the_same() -> None:
    clock = Clock()
    vitals = Vitals(Group(), clock, workers_every_s=0.0)
    clock.lap("data")
    told = vitals.exchange(math.nan)
    assert told.workers is None and set(told.seconds) == {"data"} and math.isnan(told.sums()[0])
    assert vitals._in_all.seconds.shape == (1, len(PHASES))
