"""What the loop costs: Shoal's loop against one written by hand, on the same model, data and settings, in turns."""

import copy
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.core.group import Group
from shoal.core.move import move
from shoal.core.objective import Objective
from shoal.core.process import Process, choose_device
from shoal.core.rng import seed_all
from shoal.core.spec import DataSpec
from shoal.data.build import build_datasets
from shoal.data.dataset import Datasets, reads_batches
from shoal.data.loader import train_batches
from shoal.data.order import Order
from shoal.models.build import build_model
from shoal.observe.clock import Clock
from shoal.observe.console import SilentConsole
from shoal.observe.records import Observers
from shoal.observe.run_folder import RunFolder
from shoal.parallel.build import build_unit
from shoal.parallel.numerics import autocast, build_scaler, torch_settings
from shoal.parallel.optimizer import build_optimizer
from shoal.recipe.schema import Recipe
from shoal.tasks.build import build_task, task_objective
from shoal.train.build import step_settings
from shoal.train.data_watch import DataWatch
from shoal.train.feeding import plan_feeding
from shoal.train.hardware import for_workers
from shoal.train.loop import run_loop
from shoal.train.plan import Plan
from shoal.train.schedule import learning_rate, peak_lr
from shoal.train.state import TrainState
from shoal.train.training import Training
from shoal.train.vitals import Vitals

TRIVIAL: dict[str, Any] = {
    "name": "trivial",
    "task": "image_classification",
    "model": {"name": "mlp", "hidden": [4]},
    "data": {"name": "synthetic", "samples": 4096, "val_samples": 8, "shape": [1, 2, 2], "classes": 2},
    "optim": {"name": "sgd", "lr": 0.01},
    "train": {"steps": 1, "global_batch": 8},
}
"""A model that computes next to nothing, so that what is left is the loop."""


@dataclass(frozen=True)
class Bench:
    """One model on one dataset, to be trained both ways."""

    recipe: Recipe
    dataset: Any
    model: nn.Module
    objective: Objective
    process: Process


def build_bench(recipe: Recipe) -> Bench:
    """What both loops share."""
    if recipe.data is None or recipe.model is None:
        raise UserError(f"bench step: needs the recipe's own data: and model:, but task {recipe.task.name} brings them")
    process = Process(0, 1, choose_device(recipe.cluster.gpus_per_worker))
    recipe = for_workers(recipe, process)
    assert recipe.data is not None and recipe.model is not None
    datasets = build_datasets(recipe.data, recipe.train.seed)
    if not reads_batches(datasets.train):
        raise UserError(f"data.name: {recipe.data.name} is read item by item; bench step needs whole batches")
    seed_all(recipe.train.seed)
    model = build_model(recipe.model, datasets.spec)
    objective = task_objective(build_task(recipe.task))
    return Bench(recipe, datasets.train, model, objective, process)


def measure(recipe: Recipe, steps: int, rounds: int, warmup: int) -> dict[str, Any]:
    """Seconds a step of both loops, `rounds` times in turns; the ratio is taken round by round, against drift."""
    with torch_settings(precision=recipe.train.precision, threads=recipe.cluster.threads_per_worker):
        bench = build_bench(recipe)
        shoal_loop, by_hand = _ShoalLoop(bench), _HandWrittenLoop(bench)
        for loop in (shoal_loop, by_hand):
            loop.run(warmup)
        shoal_s: list[float] = []
        hand_s: list[float] = []
        for number in range(rounds):
            pair: list[tuple[_ShoalLoop | _HandWrittenLoop, list[float]]] = [(shoal_loop, shoal_s), (by_hand, hand_s)]
            for loop, times in pair if number % 2 == 0 else pair[::-1]:
                times.append(loop.run(steps) / steps)
    ratios = [ours / theirs for ours, theirs in zip(shoal_s, hand_s, strict=True)]
    extra = [ours - theirs for ours, theirs in zip(shoal_s, hand_s, strict=True)]
    return {
        "recipe": recipe.name,
        "global_batch": recipe.train.global_batch,
        "steps": steps,
        "rounds": rounds,
        "shoal_step_ms": 1e3 * statistics.median(shoal_s),
        "by_hand_step_ms": 1e3 * statistics.median(hand_s),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "overhead_us": 1e6 * statistics.median(extra),
    }


class _SavesNothing:
    """Stands where a run has its checkpoints."""

    def save(self) -> None:
        """Nothing."""

    def finish(self, ending: str) -> None:
        """Nothing to wait for."""

    def report(self) -> dict[str, float]:
        """Nothing."""
        return {}


class _ShoalLoop:
    """The loop as a run has it: loader, state, clock, reports into a folder. Without evaluation and saving."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        recipe = bench.recipe
        self.unit = build_unit(
            recipe.parallel, copy.deepcopy(bench.model), bench.objective, step_settings(recipe), bench.process
        )
        self.order = Order(len(bench.dataset), recipe.train.global_batch, recipe.train.seed)
        datasets = Datasets(bench.dataset, None, DataSpec())
        self.feeding = plan_feeding(recipe, datasets, bench.objective, bench.process)

    def run(self, steps: int) -> float:
        """Seconds for `steps` steps."""
        recipe, feeding = self.bench.recipe, self.feeding
        plan = Plan(steps, self.order.steps_per_epoch, steps + 1, steps + 1, recipe.observe.every_steps)
        with tempfile.TemporaryDirectory() as temporary:
            folder = RunFolder(Path(temporary) / "run")
            folder.open(None)
            clock = Clock(is_split=recipe.observe.phases)
            run = Training(
                recipe=recipe,
                plan=plan,
                state=TrainState(),
                unit=self.unit,
                batches=lambda step: train_batches(
                    feeding.datasets.train,
                    self.order,
                    step,
                    plan.num_steps,
                    micro_batch=recipe.micro_batch(1),
                    loading=feeding.train,
                ),
                data=DataWatch((feeding.train.statistics,), Group(), Observers()),
                validation=None,
                items=self.bench.objective.items,
                checkpoints=_SavesNothing(),
                saved_step=None,
                observer=Observers(folder, SilentConsole()),
                stop=lambda: None,
                clock=clock,
                vitals=Vitals(Group(), clock),
            )
            _wait(self.bench.process.device)
            started = time.perf_counter()
            run_loop(run)
            _wait(self.bench.process.device)
            elapsed = time.perf_counter() - started
            folder.close()
        return elapsed


class _HandWrittenLoop:
    """What one would write without Shoal: no report, no state, no resume."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.device = bench.process.device
        self.model = copy.deepcopy(bench.model).to(self.device)
        self.forward = cast(nn.Module, torch.compile(self.model)) if bench.recipe.train.compile else self.model
        self.optimizer = build_optimizer(self.model, bench.recipe.optim)
        self.scaler = build_scaler(bench.recipe.train.precision, self.device)
        self.autocast = autocast(bench.recipe.train.precision, self.device)

    def run(self, steps: int) -> float:
        """Seconds for `steps` steps."""
        recipe, dataset, model, optimizer = self.bench.recipe, self.bench.dataset, self.model, self.optimizer
        batch_size, clip_norm = recipe.train.global_batch, recipe.train.clip_norm
        peak = peak_lr(recipe.optim, batch_size)
        per_epoch = -(-len(dataset) // batch_size)
        _wait(self.device)
        started = time.perf_counter()
        total = torch.zeros((), device=self.device)
        for step in range(steps):
            if step % per_epoch == 0:
                order = torch.randperm(len(dataset)).numpy()
            first = step % per_epoch * batch_size
            batch = move(dataset.batch(order[first : first + batch_size], 0), self.device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe.optim, peak, step, steps)
            with self.autocast:
                loss = self.bench.objective.loss(self.forward, batch)
            if isinstance(loss, tuple):
                loss = loss[0] / loss[1]
            (self.scaler.scale(loss) if self.scaler else loss).backward()  # type: ignore[no-untyped-call]
            if clip_norm is not None:
                if self.scaler:
                    self.scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            if self.scaler:
                self.scaler.step(optimizer)
                self.scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.detach()
        _wait(self.device)
        return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
