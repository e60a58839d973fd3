"""Stopping together: whoever has a reason, all workers get it at the same call, and none waits for another for long."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.group import Group
from shoal.core.process import Process
from shoal.train.agree import REASONS, AgreedStop, calls_to_skip
from tests.many import Ranks


class Table:
    """Where threads in the place of workers put their values: a sum or maximum is there once all have put theirs."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rounds: list[dict[int, tuple[float, ...]]] = []
        self.changed = threading.Condition()

    def put(self, round_number: int, rank: int, values: tuple[float, ...]) -> None:
        with self.changed:
            while len(self.rounds) <= round_number:
                self.rounds.append({})
            self.rounds[round_number][rank] = values
            self.changed.notify_all()

    def take(self, round_number: int) -> list[tuple[float, ...]]:
        with self.changed:
            complete = self.changed.wait_for(lambda: len(self.rounds[round_number]) == self.world_size, timeout=20)
            assert complete, "a worker waits for one that does not ask"
            return list(self.rounds[round_number].values())


class Seat(Group):
    """A worker's side of the table."""

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__(rank, table.world_size)
        self.table = table
        self.round_number = -1

    def start_max(self, *values: float) -> Callable[[], list[float]]:
        self.round_number += 1
        number = self.round_number
        self.table.put(number, self.rank, values)
        return lambda: [max(column) for column in zip(*self.table.take(number), strict=True)]


@dataclass
class Worker:
    """How long its calls take, and from which call on it has a reason to stop."""

    call_s: float = 0.01
    reason: str | None = None
    since_call: int = 0
    asked: int = 0
    stopped_at: int | None = None
    agreed: str | None = None

    def run(self, seat: Seat, num_calls: int, changes: dict[int, float] | None = None) -> None:
        """Call again and again; at the calls in `changes` what a call takes becomes another."""
        now, call = 0.0, 0

        def stop() -> str | None:
            self.asked += 1
            return self.reason if call >= self.since_call else None

        agreed = AgreedStop(stop, seat, lambda: now)
        for call in range(num_calls):
            if changes and call in changes:
                self.call_s = changes[call]
                agreed.anew()
            if (found := agreed()) is not None:
                self.stopped_at, self.agreed = call, found
                assert agreed() == found, "once agreed, it stays"
                return
            now += self.call_s


def run_together(workers: list[Worker], num_calls: int, changes: dict[int, float] | None = None) -> None:
    table = Table(len(workers))
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            workers[rank].run(Seat(table, rank), num_calls, changes)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


durations = st.sampled_from([1e-5, 1e-3, 0.01, 0.05, 0.3, 20.0])


@settings(max_examples=150)
@given(
    workers=st.lists(
        st.builds(
            Worker,
            call_s=durations,
            reason=st.none() | st.sampled_from(REASONS),
            since_call=st.integers(0, 60),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_all_stop_at_the_same_call_for_the_same_reason(workers: list[Worker]) -> None:
    longest = calls_to_skip(max(worker.call_s for worker in workers))
    # Before anything is known of the pace the question is asked at every call, so the first ones come on top.
    within = 60 + longest + 3
    run_together(workers, within + 1)
    reasons = {worker.reason for worker in workers} - {None}
    assert len({(worker.stopped_at, worker.agreed) for worker in workers}) == 1
    assert (workers[0].stopped_at is not None) == bool(reasons)
    if reasons:
        first = min(worker.since_call for worker in workers if worker.reason)
        assert workers[0].agreed in reasons
        assert workers[0].stopped_at is not None
        assert first < workers[0].stopped_at <= first + longest + 3, "not before, and soon after"


@pytest.mark.parametrize(("call_s", "most"), [(1e-6, 20), (1e-3, 60), (0.05, 2600), (1.0, 10_000)])
def test_short_calls_ask_rarely_and_long_ones_every_time(call_s: float, most: int) -> None:
    workers = [Worker(call_s / 3), Worker(call_s)]
    run_together(workers, 10_000)
    assert workers[0].asked == workers[1].asked <= most
    if call_s >= 1:
        assert workers[0].asked == 10_000


def test_the_slowest_worker_sets_the_pace() -> None:
    alone, beside = [Worker(1e-4)], [Worker(1e-4), Worker(0.05)]
    run_together(alone, 2000)
    run_together(beside, 2000)
    assert alone[0].asked < 10 and beside[0].asked > 300


@pytest.mark.parametrize("at", [6, 7, 8, 9, 500])
def test_slow_calls_after_quick_ones_do_not_go_by_the_old_pace(at: int) -> None:
    """An evaluation of tiny batches between long steps: a preemption must not wait for hundreds of steps."""
    workers = [Worker(30.0), Worker(20.0, "preemption", since_call=at + 5)]
    run_together(workers, 2000, changes={5: 1e-4, at: 30.0})
    assert workers[0].stopped_at == workers[1].stopped_at
    assert workers[0].stopped_at is not None and at + 5 < workers[0].stopped_at <= at + 7
    assert workers[0].asked < 40, "and the quick ones were not asked every time"


def test_the_first_call_comes_at_once_and_says_nothing_of_the_steps() -> None:
    workers = [Worker(40.0, "SIGINT", since_call=3), Worker(40.0)]
    run_together(workers, 20)
    assert workers[0].stopped_at is not None and workers[0].stopped_at <= 5


def calls_until_stop(process: Process, seconds: list[float], who: int, after_s: float) -> tuple[int, str | None]:
    began = time.monotonic()
    stop = AgreedStop(
        lambda: "preemption" if process.rank == who and time.monotonic() - began > after_s else None, process.group
    )
    for call in range(100_000):
        if (reason := stop()) is not None:
            return call, reason
        time.sleep(seconds[process.rank])
    return -1, None


@pytest.mark.parametrize(
    ("seconds", "who"), [([0.0, 0.004, 0.0], 2), ([0.001, 0.001, 0.001], 0), ([0.15, 0.0, 0.05], 1)]
)
def test_real_workers_of_different_speed_stop_at_the_same_call(
    ranks: Callable[[int], Ranks], seconds: list[float], who: int
) -> None:
    found: list[Any] = ranks(3)(calls_until_stop, seconds, who, 0.3)
    assert len(set(found)) == 1
    call, reason = found[0]
    assert call > 0 and reason == "preemption"
