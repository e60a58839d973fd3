"""That waits for others are noticed, under whatever strategy: real processes, one of which is late."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shoal.core.process import Process
from shoal.core.waits import noticed
from tests.many import Ranks

MakeRanks = Callable[[int], Ranks]
LATE_S = 0.3


class Stopwatch:
    def __init__(self) -> None:
        self.waited_s = 0.0
        self.waits = 0
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        self.waited_s += time.perf_counter() - self._began
        self.waits += 1


def wait_in_many_ways(process: Process) -> dict[str, float]:
    """Rank 1 is late each time; how long rank 0 is seen to wait."""
    from torch.distributed import _functional_collectives as functional

    tensor = torch.ones(8)
    ways: dict[str, Callable[[], Any]] = {
        "at once": lambda: dist.all_reduce(tensor),
        "later": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "point to point": lambda: dist.recv(tensor, 1) if process.rank == 0 else dist.send(tensor, 0),
        "batched": lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [dist.P2POp((dist.irecv, dist.isend)[process.rank], tensor, 1 - process.rank)]
            )
        ],
        "functional": lambda: functional.all_reduce(tensor, "sum", dist.group.WORLD) + 1,
        "our own": lambda: process.group.sum(1.0),
    }
    ways["functional"]()  # whose first call imports for seconds
    found = {}
    for name, way in ways.items():
        watch = Stopwatch()
        dist.barrier()
        if process.rank == 1:
            time.sleep(LATE_S)
        with noticed(watch.begin, watch.end):
            way()
        found[name] = watch.waited_s
    return found


def test_every_way_to_wait_is_noticed(ranks: MakeRanks) -> None:
    waited, late = ranks(2)(wait_in_many_ways)
    assert all(0.6 * LATE_S < seconds < LATE_S + 0.5 for seconds in waited.values()), waited
    assert all(seconds < 0.6 * LATE_S for seconds in late.values()), late


def wait_elsewhere(process: Process) -> tuple[int, int, bool]:
    watch = Stopwatch()
    before = dist.Work.wait
    sibling = process.group.sibling()
    with noticed(watch.begin, watch.end):
        saving = threading.Thread(target=lambda: sibling.gather("saved"))
        saving.start()
        saving.join()
        in_thread = watch.waits
        process.group.sum(1.0)
    after = watch.waits
    process.group.sum(1.0)
    return in_thread, after - watch.waits, dist.Work.wait is before


def test_what_other_threads_wait_for_is_theirs_and_afterwards_all_is_as_before(ranks: MakeRanks) -> None:
    assert ranks(2)(wait_elsewhere) == [(0, 0, True)] * 2
