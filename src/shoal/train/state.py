"""What must survive of a run: one value, saved and loaded as a whole."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.store import CheckpointInfo, CorruptCheckpointError, Snapshot, newest_readable, set_aside
from shoal.core.errors import RunError, UserError
from shoal.core.metrics import is_better
from shoal.core.process import Process
from shoal.core.rng import capture_rng, restore_rng
from shoal.parallel.unit import TrainUnit, UnitState
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
    if state.best is None or is_better(value, state.best, early_stop.metric, early_stop.mode, early_stop.min_delta):
        state.best, state.evaluations_since_best = value, 0
    else:
        state.evaluations_since_best += 1


def should_stop_early(state: TrainState, early_stop: EarlyStopSection | None) -> bool:
    """Whether the metric has not got better for longer than is borne."""
    return early_stop is not None and state.evaluations_since_best >= early_stop.patience


def take_snapshot(unit: TrainUnit, state: TrainState, process: Process, train_samples: int) -> Snapshot:
    """All that must survive. Weights that are not finite are never saved: they would poison every resume."""
    unit_state = unit.state()
    floating = [tensor for tensor in unit_state.tensors.values() if tensor.is_floating_point()]
    if not bool(torch.stack([tensor.isfinite().all() for tensor in floating]).all()):
        raise RunError(
            f"the weights became infinite or nan by step {state.step}: lower optim.lr, raise optim.warmup_steps "
            "or set train.clip_norm=1.0"
        )
    values = {
        "train": state.to_values(),
        "train_samples": train_samples,
        "unit": unit_state.values,
        "rng": [capture_rng(process.device)],
    }
    return Snapshot(unit_state.tensors, values)


def restore_newest(
    folder: Path, unit: TrainUnit, process: Process, train_samples: int
) -> tuple[TrainState, CheckpointInfo | None, list[dict[str, Any]]]:
    """Load the newest checkpoint that can be read; corrupt ones are set aside and told of."""
    rejected: list[dict[str, Any]] = []
    for info, snapshot in newest_readable(folder):
        if isinstance(snapshot, CorruptCheckpointError):
            rejected.append({"step": info.step, "reason": str(snapshot), "path": str(set_aside(info))})
            continue
        if snapshot.values["train_samples"] != train_samples:
            raise UserError(
                f"data: there are {train_samples:,} training samples now and there were "
                f"{snapshot.values['train_samples']:,} when step {info.step} was saved, so the order would be another; "
                "bring the data back as it was, or start a new run"
            )
        unit.load(UnitState(snapshot.tensors, snapshot.values["unit"]))
        restore_rng(snapshot.values["rng"][process.rank], process.device)
        return TrainState.from_values(snapshot.values["train"]), info, rejected
    return TrainState(), None, rejected
