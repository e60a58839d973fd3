"""How much of a step is communication that nothing hides, under one recipe. Runs on every worker."""

import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.bench.comm_trace import STEP, StepCost, step_costs
from shoal.core.memory import keep_freed_memory
from shoal.core.process import Process, pinned
from shoal.parallel.numerics import torch_settings
from shoal.recipe.load import check_tree
from shoal.recipe.schema import Recipe
from shoal.train.build import build
from shoal.train.hardware import for_workers

_WARMUP = 4
"""Steps before any that count: memory is taken, and PowerSGD begins to pack."""


def measure(process: Process, tree: dict[str, Any], steps: int, threads: int, folder: Path) -> dict[str, Any]:
    """Build what the recipe describes and take so many steps, once by the clock and once more under a profiler.

    What communication costs is read from the profiler's trace. It makes a step a little longer, so how long a step
    takes is told by the clock.
    """
    recipe = for_workers(check_tree(tree).recipe, process)
    threads = recipe.cluster.threads_per_worker or threads
    settings = torch_settings(precision=recipe.train.precision, threads=threads, device=process.device)
    pinning = pinned(process, threads) if recipe.cluster.pin_cores else contextlib.nullcontext()
    if process.device.type == "cpu":
        keep_freed_memory()
    with settings, pinning, _stepping(recipe, process, _WARMUP + 2 * steps) as step:
        for _ in range(_WARMUP):
            step()
        process.group.sum(0.0)
        seconds = [_timed(step) for _ in range(steps)]
        costs = profiled(step, steps, process, folder)
    gc.collect()  # a unit refers to itself; the next one needs its memory
    everybody = process.group.gather([statistics.median(seconds), *_shares(costs)])
    step_s, communication, exposed, calls = (statistics.mean(values) for values in zip(*everybody, strict=True))
    return {
        "step_ms": 1e3 * step_s,
        "communication_share": communication,
        "exposed_share": exposed,
        "calls": calls,
        "exposed_share_by_worker": [worker[2] for worker in everybody],
    }


def _shares(costs: Iterable[StepCost]) -> list[float]:
    """Of the step: all communication, and what is exposed of it; and how often there is any. Medians over the steps."""
    rows = [(cost.communication_s / cost.step_s, cost.exposed_s / cost.step_s, cost.calls) for cost in costs]
    return [statistics.median(values) for values in zip(*rows, strict=True)]


@contextlib.contextmanager
def _stepping(recipe: Recipe, process: Process, num_steps: int) -> Iterator[Callable[[], None]]:
    """Takes one step whenever it is called, up to `num_steps` times; it is done when the device is."""
    built = build(recipe, process)
    unit = built.unit
    batches = built.batches(0, num_steps)

    def step() -> None:
        unit.forward_backward(next(batches))
        unit.optimizer_step(recipe.optim.lr)
        if process.device.type == "cuda":
            torch.cuda.synchronize(process.device)

    with contextlib.closing(batches):
        yield step


def _timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def profiled(step: Callable[[], object], steps: int, process: Process, folder: Path) -> list[StepCost]:
    """What each of so many steps cost this worker; `folder` is where the trace lies for a moment."""
    on_gpu = process.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    # What follows an operation, such as the second half of PowerSGD, starts in the thread in which that was done.
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=every_thread) as profiler:
        process.group.sum(0.0)  # starting it takes one longer than another, which is nobody's step
        for _ in range(steps):
            with record_function(STEP):
                step()
    trace = folder / f"trace-{process.rank}.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    trace.unlink()
    return step_costs(events, on_gpu)
