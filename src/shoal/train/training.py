"""Everything that one run needs while it trains."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.group import Group
from shoal.observe.clock import Clock
from shoal.observe.records import Observer
from shoal.parallel.unit import TrainUnit
from shoal.recipe.schema import Recipe
from shoal.train.data_watch import DataWatch
from shoal.train.plan import Plan
from shoal.train.profiling import Profiler
from shoal.train.save import Saving
from shoal.train.state import TrainState
from shoal.train.vitals import Vitals


@dataclass
class Training:
    """Built by the worker, for the loop."""

    recipe: Recipe
    plan: Plan
    state: TrainState
    unit: TrainUnit
    batches: Callable[[int], Generator[StepBatch]]
    """The steps from a given one on."""
    validation: Callable[[], Iterator[MicroBatch]] | None
    items: str
    """What the loss counts: samples or tokens."""
    checkpoints: Saving
    data: DataWatch
    saved_step: int | None
    observer: Observer
    stop: Callable[[], str | None]
    """Why to stop now, or None; the same on every worker."""
    clock: Clock
    vitals: Vitals
    """What workers tell each other when they report."""
    profiler: Profiler = field(default_factory=Profiler)
    """Records some steps in full, where it is asked for."""
    group: Group = field(default_factory=Group)
    """All workers of the run."""
    items_done: int = 0
    """Samples or tokens trained on, by all workers since this start."""
    carried_items: int = 0
    """Of what the next report counts, what was trained on before this start."""
    reported_samples: int = 0
    reported_stepping_s: float = 0.0
    first_step_s: float | None = None
    """Seconds by the clock when the first step was done."""
