"""What must survive of a run: one value, saved and loaded as a whole."""

from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.core.metrics import is_better
from shoal.recipe.schema import EarlyStopSection


@dataclass
class TrainState:
    """Where a run stands."""

    step: int = 0
    """Optimizer steps done; the position in the data follows from it."""
    evaluated_step: int = 0
    """The last step whose evaluation is done: an interruption in the middle of one repeats it on resume."""
    reported_step: int = 0
    """The last step whose report is written."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Newest values by name, training and validation."""
    best: float | None = None
    """Best value of the metric that early stopping watches."""
    best_of: str = ""
    """Which metric that is, and which way it is better."""
    evaluations_since_best: int = 0
    window_loss: float = 0.0
    """Sum of the loss since the last report, so that a report after a resume is the one it would have been."""
    window_count: int = 0
    samples: int = 0
    """Samples consumed so far."""

    def to_values(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "TrainState":
        """What `to_values` gave."""
        return cls(**values)


def note_evaluation(state: TrainState, early_stop: EarlyStopSection | None) -> None:
    """Count this evaluation towards early stopping."""
    if early_stop is None:
        return
    value = state.metrics[early_stop.metric]
    watched = f"{early_stop.metric} {early_stop.mode}"
    if state.best_of != watched:
        state.best, state.best_of = None, watched
    if state.best is None or is_better(value, state.best, early_stop.metric, early_stop.mode, early_stop.min_delta):
        state.best, state.evaluations_since_best = value, 0
    else:
        state.evaluations_since_best += 1


def should_stop_early(state: TrainState, early_stop: EarlyStopSection | None) -> bool:
    """Whether the metric has not got better for longer than is borne."""
    return early_stop is not None and state.evaluations_since_best >= early_stop.patience


@dataclass(frozen=True)
class Identity:
    """What makes a run the run it is: a checkpoint of another is refused."""

    train_samples: int
    fixed: dict[str, str]
    """Hash of every field of the recipe that may not change, as it was after references were resolved."""
    files: str | None = None
    """Of data in shards or image files, a hash of what else the samples of a step depend on: files, window, lanes."""
