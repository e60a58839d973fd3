"""Shoal in `shoal bench step --peers`: the loop as a run has it: loader, clock, vitals, reports."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from shoal.bench.overhead import circumstances_of, clock_of, system_of
from shoal.bench.overhead_sides import endless
from shoal.bench.step import build_bench
from shoal.bench.step_facts import facts_of
from shoal.bench.step_recipes import recipe_for
from shoal.bench.step_turns import Turns
from shoal.core.group import Group
from shoal.core.memory import keep_freed_memory
from shoal.core.spec import DataSpec
from shoal.data.dataset import Datasets
from shoal.observe.console import SilentConsole
from shoal.observe.records import Observers, Report
from shoal.observe.run_folder import RunFolder
from shoal.parallel.build import build_unit
from shoal.parallel.numerics import torch_settings
from shoal.recipe.schema import Recipe
from shoal.train.build import step_settings
from shoal.train.feeding import plan_feeding
from shoal.train.loop import run_loop
from shoal.train.training import Training
from shoal.train.vitals import Vitals


def train(asked: Recipe, job: dict[str, Any], turns: Turns, device: torch.device) -> None:
    """Train until there are no more turns."""
    recipe = recipe_for(asked, device)
    threads = job.get("threads") or recipe.cluster.threads_per_worker
    settings = torch_settings(
        precision=recipe.train.precision,
        deterministic=recipe.train.deterministic,
        threads=threads,
        device=device,
        gpu_memory_fraction=recipe.cluster.gpu_memory_share,
        gpu_allocator=recipe.cluster.gpu_allocator,
    )
    if device.type == "cpu":
        keep_freed_memory()  # as every run does
    with settings, tempfile.TemporaryDirectory(prefix="shoal-") as temporary:
        folder = RunFolder(Path(temporary) / "run")
        folder.open(None)
        _train(recipe, job, turns, folder)
        folder.close()


def _train(recipe: Recipe, job: dict[str, Any], turns: Turns, folder: RunFolder) -> None:
    bench = build_bench(recipe)
    process, objective = bench.process, bench.objective
    turns.facts = facts_of(bench) | {"precision": recipe.train.precision, "compiles": recipe.train.compile}
    unit = build_unit(recipe.parallel, bench.model, objective, step_settings(recipe), process)
    feeding = plan_feeding(recipe, Datasets(bench.dataset, None, DataSpec()), objective, process)
    vitals = Vitals(
        Group(),
        clock_of(process.device, recipe.observe.phases),
        circumstances_of(recipe, process.device),
        system_of(process.device) if recipe.observe.phases else None,
        # A line comes every so many seconds; this run has only its share of them.
        recipe.observe.workers_every_s * job["contenders"],
    )
    keeper, ticker = _Keeper(turns), _Ticker(turns)
    opening = endless(
        *(recipe, unit, feeding, objective, vitals, Observers(folder, SilentConsole(), keeper)),
        lambda: "pause" if keeper.step >= turns.num_opening else None,
        every=1,
    )
    turns.begin(recipe.train.seed)
    run_loop(opening)
    turns.wait_for_device()
    if not turns.opened(keeper.losses):
        return
    run = endless(
        *(recipe, unit, feeding, objective, vitals, Observers(folder, SilentConsole(), ticker)),
        lambda: "pause" if turns.is_over else None,
    )
    _go_on_from(opening, run)
    run_loop(run)


def _go_on_from(before: Training, run: Training) -> None:
    run.state = before.state
    run.first_step_s = before.first_step_s


class _Keeper(SilentConsole):
    """Keeps the loss of every step."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.step = 0
        self.losses: list[tuple[float, int]] = []
        self._samples = 0

    def report(self, report: Report) -> None:
        """Of one step."""
        self.losses.append((report.metrics["train_loss"], report.samples - self._samples))
        self._samples = report.samples

    def tick(self, step: int) -> None:
        """A step is done."""
        self.step = step
        if step == 1:
            self.turns.first_step_done()


class _Ticker(SilentConsole):
    """Says that a step is done, and is held there until it is Shoal's turn again."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def tick(self, step: int) -> None:
        """A step is done."""
        self.turns.after_step()
