"""What observing costs: the same loop with all of it and with none of it, in turns, in one process."""

import contextlib
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.bench.made_data import with_made_data
from shoal.bench.overhead_sides import NEVER, Side, Took
from shoal.core.errors import UserError
from shoal.core.group import Group
from shoal.core.objective import Objective
from shoal.core.process import Process, choose_device
from shoal.core.rng import seed_all
from shoal.data.build import build_datasets
from shoal.models.build import build_model
from shoal.observe.clock import Clock
from shoal.observe.console import LineConsole
from shoal.observe.prometheus.endpoint import serve
from shoal.observe.prometheus.exposition import Exposition
from shoal.observe.records import Observer, Observers, Report
from shoal.observe.run_folder import RunFolder
from shoal.observe.system import SystemWatch
from shoal.observe.verdict import Circumstances
from shoal.parallel.build import build_unit
from shoal.parallel.numerics import torch_settings
from shoal.parallel.unit import TrainUnit
from shoal.recipe.load import LoadedRecipe
from shoal.recipe.schema import Recipe
from shoal.tasks.build import build_task, task_objective
from shoal.train.build import step_settings
from shoal.train.feeding import Feeding, plan_feeding
from shoal.train.hardware import for_workers
from shoal.train.vitals import Vitals

MNIST_SIZED: dict[str, Any] = {
    "name": "mnist",
    "task": "image_classification",
    "model": {"name": "simple_cnn", "channels": [32, 64], "hidden": 128, "dropout": 0.25},
    "data": {"name": "mnist"},
    "optim": {"name": "adamw", "lr": 2.0e-3, "weight_decay": 0.01},
    "train": {"steps": 1, "global_batch": 128},
}
"""The recipe `mnist`, told of as often as recipes are by default, which is more often than it asks for itself."""
_SCRAPE_EVERY_S = 5.0
_LINES = 50
"""How often a line of workers.jsonl is made to see what it costs."""

Say = Callable[[str], None]


def measure(loaded: LoadedRecipe, steps: int, rounds: int, say: Say = lambda line: None) -> dict[str, Any]:
    """Seconds a step with and without, `rounds` times in turns; ratios are taken of neighbours, against drift.

    A line of workers.jsonl comes too seldom to be in many turns; what it costs is measured apart and added.
    """
    with tempfile.TemporaryDirectory() as temporary:
        recipe, is_made = with_made_data(loaded.recipe, Path(temporary))
        if recipe.data is None or recipe.model is None:
            raise UserError(
                f"bench overhead: needs the recipe's own data: and model:, but task {recipe.task.name} brings them"
            )
        every = recipe.observe.every_steps
        steps = -(-steps // every) * every  # so that each turn has its share of reports
        device = choose_device(recipe.cluster.gpus_per_worker)
        recipe = for_workers(recipe, Process(0, 1, device))
        with torch_settings(precision=recipe.train.precision, threads=recipe.cluster.threads_per_worker, device=device):
            unit, feeding, objective = _build(recipe, device)
            with _observed(recipe, unit, Path(temporary)) as (observer, folder):
                vitals = Vitals(
                    Group(), clock_of(device), circumstances_of(recipe, device), system_of(device), _every_s(recipe)
                )
                on = Side(recipe, unit, feeding, objective, vitals, observer)
                blind = Vitals(Group(), Clock(is_split=False))
                off = Side(recipe, unit, feeding, objective, blind, Observers(), every=NEVER)
                on_took, off_took = _take_turns(on, off, steps, rounds, say)
                line_s = _line_s(recipe, device, folder)
    return _result(recipe, device, is_made, steps, on_took, off_took, line_s)


def _build(recipe: Recipe, device: torch.device) -> tuple[TrainUnit, Feeding, Objective]:
    assert recipe.data is not None and recipe.model is not None
    process = Process(0, 1, device)
    datasets = build_datasets(recipe.data, recipe.train.seed)
    seed_all(recipe.train.seed)
    objective = task_objective(build_task(recipe.task))
    unit = build_unit(
        recipe.parallel, build_model(recipe.model, datasets.spec), objective, step_settings(recipe), process
    )
    return unit, plan_feeding(recipe, datasets, objective, process), objective


def clock_of(device: torch.device, is_split: bool = True) -> Clock:
    """The clock that a run has."""
    if device.type != "cuda":
        return Clock(is_split=is_split)
    from shoal.observe.cuda_marks import CudaMarks

    return Clock(CudaMarks(device), is_split)


def circumstances_of(recipe: Recipe, device: torch.device) -> Circumstances:
    """What a verdict on a run goes by."""
    train = recipe.train
    return Circumstances(is_gpu=device.type == "cuda", precision=train.precision, compiles=train.compile is True)


def system_of(device: torch.device) -> SystemWatch:
    """What watches the machine in a run."""
    return SystemWatch(device.index if device.type == "cuda" else None)


def _every_s(recipe: Recipe) -> float:
    """Twice as long, because half of the time is the other side's."""
    return 2 * recipe.observe.workers_every_s


@contextlib.contextmanager
def _observed(recipe: Recipe, unit: TrainUnit, place: Path) -> Iterator[tuple[Observer, RunFolder]]:
    """What sees a run: its folder, a log, and, where the recipe gives a port, an endpoint that somebody asks."""
    folder = RunFolder(place / "run")
    folder.open(None)
    exposition = Exposition("overhead")
    port = recipe.observe.metrics_port
    with contextlib.ExitStack() as stack:
        stack.callback(folder.close)
        log = LineConsole(stack.enter_context(open(os.devnull, "w", encoding="utf-8")))  # noqa: PTH123 - no path
        if port is None:
            yield Observers(folder, log), folder
            return
        server = serve(exposition, "127.0.0.1", port)
        stack.callback(server.close)
        stack.enter_context(_asked(f"http://127.0.0.1:{server.port}/metrics"))
        yield Observers(folder, log, exposition), folder


@contextlib.contextmanager
def _asked(url: str) -> Iterator[None]:
    """Somebody reads this every few seconds."""
    enough = threading.Event()

    def ask() -> None:
        while not enough.wait(_SCRAPE_EVERY_S):
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - our own
                answer.read()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def _take_turns(on: Side, off: Side, steps: int, rounds: int, say: Say) -> tuple[list[Took], list[Took]]:
    for side in (on, off):
        side.run(steps)
    on_took: list[Took] = []
    off_took: list[Took] = []
    for number in range(rounds):
        pair = [(on, on_took), (off, off_took)]
        for side, took in pair if number % 2 == 0 else pair[::-1]:
            took.append(side.run(steps))
        if (number + 1) % 10 == 0 and number + 1 < rounds:
            ratio = statistics.median(_ratios(on_took, off_took, "step_s"))
            say(f"{number + 1} of {rounds} rounds: ratio {ratio:.4f}")
    return on_took, off_took


def _ratios(on: list[Took], off: list[Took], what: str) -> list[float]:
    return [getattr(with_it, what) / getattr(without, what) for with_it, without in zip(on, off, strict=True)]


def _line_s(recipe: Recipe, device: torch.device, folder: RunFolder) -> float:
    """What it takes to look at the machine, to judge, and to write a line of workers.jsonl."""
    vitals = Vitals(Group(), Clock(), circumstances_of(recipe, device), system_of(device), workers_every_s=0.0)
    times = []
    for step in range(_LINES):
        began = time.perf_counter()
        vitals.clock.lap("forward")
        told = vitals.exchange()
        folder.report(Report(step, 0.0, {}, told.seconds, workers=told.workers))
        times.append(time.perf_counter() - began)
        assert told.workers is not None
    return statistics.median(times)


def _result(
    recipe: Recipe, device: torch.device, is_made: bool, steps: int, on: list[Took], off: list[Took], line_s: float
) -> dict[str, Any]:
    ratios, cpu_ratios = _ratios(on, off, "step_s"), _ratios(on, off, "cpu_s")
    ratio, (low, high) = statistics.median(ratios), interval(ratios)
    line_share = line_s / recipe.observe.workers_every_s
    return {
        "recipe": recipe.name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "data": "made up" if is_made else "the recipe's own",
        "global_batch": recipe.train.global_batch,
        "every_steps": recipe.observe.every_steps,
        "prometheus": recipe.observe.metrics_port is not None,
        "steps": steps,
        "rounds": len(ratios),
        "on_step_ms": 1e3 * statistics.median(took.step_s for took in on),
        "off_step_ms": 1e3 * statistics.median(took.step_s for took in off),
        "ratio": ratio,
        "ratio_interval": [low, high],
        "ratios": ratios,
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_ratio_interval": list(interval(cpu_ratios)),
        "line_ms": 1e3 * line_s,
        "line_share": line_share,
        "overhead": ratio - 1 + line_share,
        "overhead_interval": [low - 1 + line_share, high - 1 + line_share],
    }


def interval(ratios: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Where the median would lie if all were done again: the middle of what samples of them give."""
    drawn = np.random.default_rng(0).choice(np.asarray(ratios), (2000, len(ratios)))
    outside = 100 * (1 - confidence) / 2
    low, high = np.percentile(np.median(drawn, axis=1), [outside, 100 - outside])
    return float(low), float(high)


def verdict(result: dict[str, Any], allowed: float = 0.01) -> str:
    """Whether it is as little as promised, as far as that was seen."""
    low, high = result["overhead_interval"]
    if high <= allowed:
        return f"at most {allowed:.0%} of a step"
    if low > allowed:
        return f"more than {allowed:.0%} of a step"
    return f"not seen whether it is more than {allowed:.0%}: the machine is too restless, or there were too few rounds"
