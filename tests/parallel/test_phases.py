"""What every strategy says of its steps: the passes apart, and waiting for a worker that is late as communication."""

import time
from collections.abc import Callable

import pytest

from shoal.core.process import Process
from shoal.core.waits import noticed
from shoal.data.loader import train_batches
from shoal.data.order import Order
from shoal.observe.clock import Clock
from tests.many import Ranks
from tests.parallel.conform import BATCH, SAMPLES, STRATEGIES, Case, data

pytestmark = pytest.mark.alone

MakeRanks = Callable[[int], Ranks]
LATE_S = 0.1
STEPS = 5
ON_TWO = ("ddp", "fsdp", "zero2", "zero3", "1f1b", "tensor")


def timed_steps(process: Process, parallel: dict[str, object]) -> tuple[dict[str, float], float]:
    """The last rank begins every step late; seconds by phase, and the wall time of the same steps."""
    case = Case(parallel)
    unit = case.unit(process)
    batches = train_batches(
        *(data(), Order(SAMPLES, BATCH, seed=3), 0, 4 + STEPS),
        rank=unit.data_rank,
        world_size=unit.data_size,
        micro_batch=case.micro_batch,
    )
    for _ in range(4):  # with what happens only once
        unit.forward_backward(next(batches))
        unit.optimizer_step(3e-3)
    clock = Clock()
    unit.lap = clock.lap_within
    with noticed(clock.begin_wait, clock.end_wait):
        for batch in batches:
            if process.rank == process.world_size - 1:
                time.sleep(LATE_S)
            clock.lap("data")
            unit.forward_backward(batch)
            clock.lap("backward")
            unit.optimizer_step(3e-3)
            clock.lap("optimizer")
    return clock.total_s, clock.elapsed_s


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, 2) for name in ON_TWO),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in STRATEGIES),
    ],
)
def test_those_who_wait_for_a_late_worker_say_so(ranks: MakeRanks, name: str, workers: int) -> None:
    parallel = STRATEGIES[name]
    (first, elapsed_s), *_, (last, _) = ranks(workers)(timed_steps, parallel)
    assert sum(first.values()) == pytest.approx(elapsed_s, rel=0.02)
    assert first["comm"] > 0.8 * LATE_S * STEPS, first
    assert last["data"] > 0.9 * LATE_S * STEPS, "the late one is not waited for by itself"
    assert last["comm"] < 1.2 * first["comm"]
    passes = {"forward_backward"} if parallel["strategy"] == "pipeline" else {"forward", "backward"}
    assert passes | {"optimizer", "data", "comm"} <= first.keys()
    if parallel["strategy"] == "pipeline":
        assert first.get("backward", 0.0) < 0.01
