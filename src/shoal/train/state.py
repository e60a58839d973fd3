"""What must survive of a run: one value, saved and loaded as a whole."""

import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.store import (
    CheckpointInfo,
    CorruptCheckpointError,
    Snapshot,
    list_checkpoints,
    newest_readable,
    read_checkpoint,
    set_aside,
)
from shoal.core.errors import RunError, UserError
from shoal.core.group import Group
from shoal.core.metrics import is_better
from shoal.core.process import Process
from shoal.core.rng import capture_rng, derive_seed, restore_rng, seed_all
from shoal.parallel.unit import TrainUnit, UnitState
from shoal.recipe.identity import changed_field
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


def take_snapshot(unit: TrainUnit, state: TrainState, process: Process, identity: Identity) -> Snapshot:
    """All that must survive. Weights that are not finite are never saved: they would poison every resume."""
    unit_state = unit.state()
    _check_finite(unit, unit_state, state.step)
    own = {
        "rng": capture_rng(process.device),
        "window_loss": state.window_loss,
        "window_count": state.window_count,
    }
    values = {
        "train": state.to_values(),
        "identity": asdict(identity),
        "unit": unit_state.values,
        "workers": process.group.gather(own),
    }
    return Snapshot(unit_state.tensors, values)


def _check_finite(unit: TrainUnit, state: UnitState, step: int) -> None:
    """Parameters and optimizer state; buffers may hold infinities for good reason, such as attention masks."""
    learned = {f"model.{name}" for name, _ in unit.model.named_parameters()}
    checked = [
        tensor.isfinite().all()
        for name, tensor in state.tensors.items()
        if name in learned or name.startswith("optim.")
    ]
    if checked and not bool(torch.stack(checked).all()):
        raise RunError(
            f"the weights became infinite or nan by step {step}: lower optim.lr, raise optim.warmup_steps "
            "or set train.clip_norm=1.0"
        )


def restore_newest(
    folder: Path, unit: TrainUnit, process: Process, identity: Identity, seed: int
) -> tuple[TrainState, CheckpointInfo | None, list[dict[str, Any]]]:
    """Load the newest checkpoint that can be read; corrupt ones are set aside and told of, once there is a better.

    Rank 0 finds it, so that all workers go on from the same one.
    """
    found: tuple[CheckpointInfo, Snapshot] | None = None
    told: list[dict[str, Any]] = []

    def find() -> int | None:
        nonlocal found, told
        found, told = _newest(folder, identity)
        return None if found is None else found[0].step

    step = on_first(process.group, find)
    if step is None:
        return TrainState(), None, told
    info, snapshot = found or _read_step(folder, step)
    unit.load(UnitState(snapshot.tensors, snapshot.values["unit"]))
    return _take_own_part(snapshot, process, seed), info, told


def _newest(folder: Path, identity: Identity) -> tuple[tuple[CheckpointInfo, Snapshot] | None, list[dict[str, Any]]]:
    rejected: list[tuple[CheckpointInfo, CorruptCheckpointError]] = []
    for info, snapshot in newest_readable(folder):
        if isinstance(snapshot, CorruptCheckpointError):
            rejected.append((info, snapshot))
            continue
        _check_identity(Identity(**snapshot.values["identity"]), identity, info.step)
        told = [{"step": bad.step, "reason": str(why), "path": str(set_aside(bad))} for bad, why in rejected]
        return (info, snapshot), told
    if rejected:
        newest, why = rejected[0]
        raise UserError(
            f"--resume: none of the {len(rejected)} checkpoints in {folder} can be read ({newest.path.name}: {why}); "
            "bring them back from a copy, or start a new run"
        )
    return None, []


def _read_step(folder: Path, step: int) -> tuple[CheckpointInfo, Snapshot]:
    """The checkpoint that rank 0 has chosen."""
    info = next((info for info in list_checkpoints(folder) if info.step == step), None)
    if info is None:
        raise UserError(
            f"--run-dir: {folder} on {socket.gethostname()} has no checkpoint of step {step}, which worker 0 sees; "
            "the run's folder must be on storage that every machine shares"
        )
    try:
        return info, read_checkpoint(info)
    except CorruptCheckpointError as error:
        raise UserError(f"--resume: {info.path} cannot be read on {socket.gethostname()}: {error}") from error


def _take_own_part(snapshot: Snapshot, process: Process, seed: int) -> TrainState:
    """The state with this worker's own generators and loss since the last report."""
    state, workers = TrainState.from_values(snapshot.values["train"]), snapshot.values["workers"]
    if len(workers) == process.world_size:
        own = workers[process.rank]
        restore_rng(own["rng"], process.device)
        state.window_loss, state.window_count = own["window_loss"], own["window_count"]
        return state
    # Another number of workers: their generators cannot be divided, so new ones begin, the same ones every time.
    seed_all(derive_seed(seed, 3, state.step, process.world_size, process.rank))
    state.window_loss = sum(worker["window_loss"] for worker in workers) if process.is_first else 0.0
    state.window_count = sum(worker["window_count"] for worker in workers) if process.is_first else 0
    return state


def on_first(group: Group, action: Callable[[], Any]) -> Any:
    """What `action` gives on rank 0; an error of the user's input there is raised on every worker."""
    value, error = None, None
    if group.rank == 0:
        try:
            value = action()
        except UserError as caught:
            error = caught
    shared, message = group.from_first([value, None if error is None else str(error)])
    if error is not None:
        raise error
    if message is not None:
        raise UserError(message)
    return shared


def _check_identity(saved: Identity, present: Identity, step: int) -> None:
    if (changed := changed_field(saved.fixed, present.fixed)) is not None:
        raise UserError(f"{changed}: is not what it was when step {step} was saved; start a new run for that")
    if saved.train_samples != present.train_samples:
        raise UserError(
            f"data: there are {present.train_samples:,} training samples now and there were "
            f"{saved.train_samples:,} when step {step} was saved, so the order would be another; "
            "bring the data back as it was, or start a new run"
        )
