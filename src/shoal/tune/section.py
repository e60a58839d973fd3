"""How to search: the `tune:` part of a space file, and what `shoal tune` says over it. Loads without torch."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shoal.core.section import Section

Scheduler = Literal["none", "asha", "hyperband", "median", "pbt", "pb2"]
Search = Literal["random", "grid", "optuna"]
Metric = Annotated[str, Field(pattern=r"^[^:\s]+(:(min|max))?$")]
SCHEDULERS: tuple[str, ...] = ("none", "asha", "hyperband", "median", "pbt", "pb2")
SEARCHES: tuple[str, ...] = ("random", "grid", "optuna")


class TuneSection(Section):
    """How to search."""

    trials: Annotated[int, Field(gt=0)] | None = None
    """Runs to make; null: all points of a grid, 8 for a population, else 16."""
    search: Search | None = None
    """Who proposes settings: random, grid (every combination), or Optuna; null: grid where the space is one, else
    random."""
    scheduler: Scheduler = "none"
    """Who stops trials that lag behind: asha, hyperband, median; pbt and pb2 replace them by others that do well."""
    metric: Annotated[list[Metric], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = []
    """What to go by, as NAME, NAME:min or NAME:max; several are searched for a Pareto front. Empty: what the recipe's
    checkpoint or early_stop section goes by, else val_loss."""
    concurrency: Annotated[int, Field(gt=0)] | None = None
    """Trials at a time; null: as many as there is room for."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Fixes what is proposed."""
    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The search stops when more than this share of its trials have failed."""
    keep_checkpoints: Annotated[int, Field(gt=0)] | None = None
    """Of how many trials that have ended checkpoints are kept, the best ones; null: of all."""
    grace: Annotated[float, Field(gt=0)] | None = None
    """asha, hyperband, median: epochs (or steps, where the recipe counts those) that every trial gets; null: one epoch,
    or a twentieth of the steps."""
    reduction: Annotated[int, Field(gt=1)] = 3
    """asha, hyperband: one trial in so many goes on from each rung."""
    interval: Annotated[float, Field(gt=0)] | None = None
    """pbt, pb2: epochs (or steps) between two comparisons of the population; null: a tenth of the run, at least an
    epoch."""
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    """pbt, pb2: the share of the population that is replaced, by that share of the best."""
    resample: Annotated[float, Field(ge=0, le=1)] = 0.25
    """pbt, pb2: how likely a setting (with pb2, of a list) is drawn anew instead of being moved a little."""
