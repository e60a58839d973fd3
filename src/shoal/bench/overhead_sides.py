"""A run that trains when it is its turn, and times its steps."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from shoal.core.group import Group
from shoal.core.objective import Objective
from shoal.data.loader import train_batches
from shoal.observe.records import Observer, Observers, Report
from shoal.parallel.unit import TrainUnit
from shoal.recipe.schema import Recipe
from shoal.train.data_watch import DataWatch
from shoal.train.feeding import Feeding
from shoal.train.loop import run_loop
from shoal.train.plan import Plan
from shoal.train.state import TrainState
from shoal.train.training import Training
from shoal.train.vitals import Vitals

NEVER = 10**9


@dataclasses.dataclass(frozen=True)
class Took:
    """What a step took."""

    step_s: float
    cpu_s: float
    """Of all cores of this process: on a machine that others use too, this tells more."""


def endless(
    recipe: Recipe,
    unit: TrainUnit,
    feeding: Feeding,
    objective: Objective,
    vitals: Vitals,
    observer: Observer,
    stop: Callable[[], str | None],
    every: int | None = None,
) -> Training:
    """A run as the loop takes it, which neither evaluates nor saves, and goes on until it is stopped.

    `every`: steps from one report to the next, where they are not to come as the recipe says.
    """
    order = feeding.order
    loading = dataclasses.replace(feeding.train, lap=vitals.clock.lap_within)
    plan = Plan(NEVER, order.steps_per_epoch, NEVER, NEVER, every or recipe.observe.every_steps)
    return Training(
        recipe=recipe,
        plan=plan,
        state=TrainState(),
        unit=unit,
        batches=lambda step: train_batches(
            feeding.datasets.train, order, step, plan.num_steps, micro_batch=recipe.micro_batch(1), loading=loading
        ),
        data=DataWatch((loading.statistics,), Group(), Observers()),
        validation=None,
        items=objective.items,
        checkpoints=_SavesNothing(),
        saved_step=None,
        observer=observer,
        stop=stop,
        clock=vitals.clock,
        vitals=vitals,
    )


class Side:
    """A run that goes on whenever it is its turn; the model is the same for both."""

    def __init__(
        self,
        recipe: Recipe,
        unit: TrainUnit,
        feeding: Feeding,
        objective: Objective,
        vitals: Vitals,
        observer: Observer,
        every: int | None = None,
    ) -> None:
        self._timer = _Timer(unit.device)
        self._run = endless(
            recipe,
            unit,
            feeding,
            objective,
            vitals,
            Observers(observer, self._timer),
            lambda: "pause" if self._run.state.step >= self._timer.until else None,
            every,
        )

    def run(self, steps: int) -> Took:
        """Train `steps` steps; one more goes first, for which the loader starts."""
        return self._timer.time(self._run.state.step + 1, steps, lambda: run_loop(self._run))


class _Timer:
    """From the end of one step to that of another: in between are as many reports as steps ask for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first = 0
        self.until = 0
        self._times: list[tuple[float, float]] = []

    def time(self, first: int, steps: int, train: Callable[[], Any]) -> Took:
        """What each of the `steps` steps after `first` takes while `train` trains them."""
        self._first, self.until, self._times = first, first + steps, []
        train()
        (began, cpu_began), (ended, cpu_ended) = self._times
        return Took((ended - began) / steps, (cpu_ended - cpu_began) / steps)

    def report(self, report: Report) -> None:
        """Nothing."""

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Nothing."""

    def tick(self, step: int) -> None:
        """A step is done."""
        if step in (self._first, self.until):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._times.append((time.perf_counter(), time.process_time()))


class _SavesNothing:
    """Stands where a run has its checkpoints."""

    def save(self) -> None:
        """Nothing."""

    def finish(self, ending: str) -> None:
        """Nothing to wait for."""

    def report(self) -> dict[str, float]:
        """Nothing."""
        return {}
