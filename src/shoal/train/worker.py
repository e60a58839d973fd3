"""One process of a run, from recipe to summary: the only place that builds things."""

import contextlib
import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.retention import to_delete
from shoal.checkpoint.store import (
    CheckpointInfo,
    clear_leftovers,
    delete_checkpoint,
    list_checkpoints,
    save_checkpoint,
)
from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.errors import RunError, UserError
from shoal.core.objective import Objective
from shoal.core.process import Process, pinned
from shoal.core.rng import derive_seed, seed_all
from shoal.core.spec import DataSpec
from shoal.data.build import build_datasets
from shoal.data.dataset import Datasets, in_one_go
from shoal.data.loader import evaluation_batches, train_batches
from shoal.data.order import Order
from shoal.data.section import OF_TASK
from shoal.models.build import build_model
from shoal.observe.records import Observer, Observers
from shoal.observe.run_folder import RunFolder
from shoal.observe.runs import read_events
from shoal.parallel.build import build_unit
from shoal.parallel.numerics import torch_settings
from shoal.parallel.unit import StepSettings, TrainUnit
from shoal.recipe.identity import fixed_fields
from shoal.recipe.load import LoadedRecipe
from shoal.recipe.schema import Recipe
from shoal.tasks.build import build_task, task_objective
from shoal.train.agree import AgreedStop
from shoal.train.loop import Training, run_loop
from shoal.train.plan import check_whole, make_plan
from shoal.train.state import Identity, TrainState, on_first, restore_newest, take_snapshot
from shoal.train.summary import Origin, summarise


@dataclass(frozen=True)
class RunRequest:
    """What to train, where to write, and who is watching."""

    loaded: LoadedRecipe
    run_dir: Path
    console: Observer
    resume: bool = False
    stop: Callable[[], str | None] = lambda: None
    """Why to stop after the present step, or None."""
    started: float = field(default_factory=time.time)
    """When the user asked, in unix seconds."""
    restarts: int = 0
    """How often the launcher has started the workers again."""
    supervised: bool = False
    """Whether a launcher watches over the workers: it then says how a run failed, because it sees all of them."""
    threads: int | None = None
    """CPU threads of this worker where the recipe leaves them open."""
    first_step_s: float | None = None
    """Seconds from `started` to the run's first step, where an earlier start of the workers has made it."""
    marks: dict[str, float] = field(default_factory=dict)
    """Seconds from `started` to what was done before the worker began: connecting, forking, meeting."""


_ONE_RUN = threading.Lock()


def train_worker(request: RunRequest, process: Process) -> dict[str, Any]:
    """Build everything, train, and return the summary. Nothing is written before all is built."""
    recipe = request.loaded.recipe
    threads = recipe.cluster.threads_per_worker or request.threads
    settings = torch_settings(
        precision=recipe.train.precision,
        deterministic=recipe.train.deterministic,
        threads=threads,
        device=process.device,
        gpu_memory_fraction=recipe.cluster.gpu_memory_fraction,
        gpu_allocator=recipe.cluster.gpu_allocator,
    )
    pinning = pinned(process, threads) if recipe.cluster.pin_cores else contextlib.nullcontext()
    if not _ONE_RUN.acquire(blocking=False):
        raise UserError("a run is going on in this process; random generators are shared, so start the other elsewhere")
    try:
        with settings, pinning:
            built = _build(recipe, process)
            request.marks["built"] = round(time.time() - request.started, 3)
            return _train(request, built, process)
    except (RuntimeError, MemoryError, OSError) as error:
        raise _in_words(error, request, process) from error.__cause__
    finally:
        _ONE_RUN.release()


@dataclass(frozen=True)
class _Built:
    """What a recipe describes, in memory."""

    unit: TrainUnit
    objective: Objective
    datasets: Datasets
    order: Order
    num_parameters: int
    identity: Identity
    warnings: list[str]


def _build(recipe: Recipe, process: Process) -> _Built:
    seed = recipe.train.seed
    seed_all(derive_seed(seed, 0))
    task = build_task(recipe.task)
    datasets = _datasets(task, recipe)
    seed_all(derive_seed(seed, 1))
    model = _model(task, recipe, datasets.spec)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    objective = task_objective(task)
    unit = build_unit(recipe.parallel, model, objective, step_settings(recipe), process)
    # From here on only the model draws, in the loop; each rank by itself.
    seed_all(derive_seed(seed, 2, process.rank))
    order = Order(len(datasets.train), recipe.train.global_batch, seed)
    identity = Identity(len(datasets.train), fixed_fields(recipe))
    return _Built(unit, objective, datasets, order, num_parameters, identity, _unused_sections(task, recipe))


def _train(request: RunRequest, built: _Built, process: Process) -> dict[str, Any]:
    """Take over or make the run's folder, say what starts, and run the loop."""
    group = process.group
    folder = RunFolder(request.run_dir)
    observer = Observers(folder, request.console) if process.is_first else Observers()
    state = TrainState()
    resumed: CheckpointInfo | None = None
    rejected: list[dict[str, Any]] = []
    is_made_here = False
    try:
        if request.resume:
            on_first(group, lambda: _take_over(folder, request))
            seed = request.loaded.recipe.train.seed
            state, resumed, rejected = restore_newest(folder.checkpoints, built.unit, process, built.identity, seed)
            if resumed is None and any(event.get("event") == "save" for event in read_events(request.run_dir)):
                raise UserError(f"--resume: the checkpoints that this run saved are gone from {folder.checkpoints}")
        elif any(group.gather(request.stop())):
            raise KeyboardInterrupt  # before the folder is made: nothing to save, nothing to resume
        run = _assemble(request, built, state, resumed, folder, observer, process)
        if state.step > run.plan.num_steps:
            raise UserError(
                f"train: the run is at step {state.step} already, beyond the {run.plan.num_steps} steps asked for; "
                "raise train.steps or train.epochs"
            )
        check_whole(run.plan, built.unit.whole_every)
        on_first(group, lambda: folder.open(state.step if request.resume else None))
        is_made_here = not request.resume and process.is_first
        workers = group.gather(_worker_facts(process))
        if process.is_first:
            _announce(folder, request, built, run, observer, resumed, rejected, workers)
    except BaseException:
        folder.close()
        if is_made_here:  # nothing of a run that did not start stays behind
            shutil.rmtree(request.run_dir, ignore_errors=True)
        raise
    try:
        return _run(run, request, folder, process, resumed)
    finally:
        folder.close()


def _take_over(folder: RunFolder, request: RunRequest) -> None:
    # After a restart the former rank 0 may still be dying, on a machine that nobody reaches.
    folder.lock(wait_s=60.0 if request.restarts else 0.5)
    clear_leftovers(folder.checkpoints)


def _announce(
    folder: RunFolder,
    request: RunRequest,
    built: _Built,
    run: Training,
    observer: Observer,
    resumed: CheckpointInfo | None,
    rejected: list[dict[str, Any]],
    workers: list[dict[str, Any]],
) -> None:
    """Say what starts, before it does."""
    folder.write_recipe(request.loaded.to_yaml())
    for rejection in rejected:
        observer.event("checkpoint_rejected", rejection)
    if resumed is not None:
        observer.event("resume", {"step": resumed.step, "path": str(resumed.path)})
    observer.event("start", _start_facts(request, built, run, len(workers)))
    observer.event("workers", {"workers": workers})
    for message in [*built.warnings, *_odd_sizes(run, built)]:
        observer.event("warning", {"message": message})


def _assemble(
    request: RunRequest,
    built: _Built,
    state: TrainState,
    resumed: CheckpointInfo | None,
    folder: RunFolder,
    observer: Observer,
    process: Process,
) -> Training:
    recipe, datasets, order = request.loaded.recipe, built.datasets, built.order
    plan = make_plan(recipe, order.steps_per_epoch)
    micro_batch = recipe.micro_batch(process.world_size)
    loading: dict[str, Any] = {
        "rank": process.rank,
        "world_size": process.world_size,
        "workers": recipe.data.workers if recipe.data else 0,
        "pin_memory": process.device.type == "cuda",
    }

    def batches(step: int) -> Generator[StepBatch]:
        return train_batches(datasets.train, order, step, plan.num_steps, micro_batch=micro_batch, **loading)

    stop = AgreedStop(request.stop, process.group)

    def validation() -> Iterator[MicroBatch]:
        batch = recipe.evaluate.batch or micro_batch
        stop.anew()  # a batch takes another time than a step
        yield from evaluation_batches(datasets.val, batch=batch, seed=recipe.train.seed, **loading)
        stop.anew()

    def save(metrics: dict[str, float]) -> None:
        snapshot = take_snapshot(built.unit, state, process, built.identity)
        if not process.is_first:
            return
        epoch = order.epoch_of(state.step)
        info = save_checkpoint(folder.checkpoints, snapshot, step=state.step, epoch=epoch, metrics=metrics)
        for old in to_delete(list_checkpoints(folder.checkpoints), recipe.checkpoint):
            delete_checkpoint(old)
        observer.event("save", {"step": info.step, "path": str(info.path), "bytes": info.num_bytes})

    evaluation_pending = plan.evaluation_pending(state.step, state.evaluated_step)
    return Training(
        recipe=recipe,
        plan=plan,
        state=state,
        unit=built.unit,
        batches=batches,
        validation=validation if datasets.val is not None else None,
        items=built.objective.items,
        save=save,
        # What was resumed needs no saving again, unless its evaluation is still to come.
        saved_step=resumed.step if resumed is not None and not evaluation_pending else None,
        observer=observer,
        stop=_stop(request.stop, stop if process.world_size > 1 else request.stop, built.unit, state),
        group=process.group,
    )


def _stop(
    own: Callable[[], str | None], agreed: Callable[[], str | None], unit: TrainUnit, state: TrainState
) -> Callable[[], str | None]:
    """Why to stop, asked by the loop: only where there is a whole state to save.

    A launcher takes being asked for the sign of life, so `own` is asked at every step: workers that do not ask each
    other for a while are not hung.
    """
    if own is agreed and unit.whole_every == 1:
        return own

    def ask() -> str | None:
        own()
        return agreed() if state.step % unit.whole_every == 0 else None

    return ask


def _run(
    run: Training, request: RunRequest, folder: RunFolder, process: Process, resumed: CheckpointInfo | None
) -> dict[str, Any]:
    """The loop and how it ended, written down whichever way that is."""
    origin = Origin(
        run_dir=request.run_dir,
        started=request.started,
        world_size=process.world_size,
        resumed_from_step=resumed.step if resumed else None,
        restarts=request.restarts,
        samples_before=run.state.samples,
        first_step_s=request.first_step_s,
    )
    try:
        ending = run_loop(run)
    except BaseException as error:  # noqa: BLE001 - written down, then raised again
        failure = _in_words(error, request, process)
        if request.supervised:
            raise failure from error.__cause__
        message = request.loaded.hide(str(failure)) or type(failure).__name__
        with contextlib.suppress(OSError):  # the disk may be what failed
            run.observer.event("failed", {"step": run.state.step, "error": type(error).__name__, "message": message})
            folder.write_summary(summarise(run, origin, "failed") | {"error": message})
        raise failure from error.__cause__
    if ending == "early_stop":
        assert run.recipe.early_stop is not None
        watched = run.recipe.early_stop.metric
        run.observer.event("early_stop", {"step": run.state.step, "metric": watched, "best": run.state.best})
    status = "done" if ending in ("done", "early_stop") else "interrupted"
    if not process.is_first:
        return {"status": status, "ended_by": ending}
    summary = summarise(run, origin, status) | {"ended_by": ending}
    folder.write_summary(summary)
    run.observer.event(status, {"step": run.state.step})
    return summary


def _in_words(  # noqa: PLR0911 - one return a cause
    error: BaseException, request: RunRequest, process: Process
) -> BaseException:
    """What the user is told when a run fails: words and a remedy where the cause is known, else the error itself."""
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, RunError):  # in words already
        return error
    if isinstance(error, UserError):  # in the middle of a run: a corrupt image, say
        return RunError(str(error))
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in message:
        return RunError(
            f"out of memory ({message}): "
            f"set train.micro_batch below {request.loaded.recipe.micro_batch(process.world_size)} "
            "(the global batch stays the same), train.activation_checkpointing=true, or use a smaller model"
        )
    if "Expected more than 1 value per channel" in message:
        return RunError(
            f"batch norm cannot train on a single sample ({message}): choose train.global_batch and train.micro_batch "
            "so that the last step of an epoch has more"
        )
    if "Expected to have finished reduction in the prior iteration" in message:
        return RunError(
            "the loss does not use every parameter of the model, and ddp waits for the gradient of each: "
            "set parallel.find_unused_parameters=true, or freeze the parameters that are not used"
        )
    if isinstance(error, RuntimeError) and message.startswith("DataLoader worker"):
        return RunError(f"a process that reads data died ({message}); it may be short of memory: lower data.workers")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        return RunError(f"{request.run_dir} cannot be written: {error.strerror}; make room, then resume the run")
    return error


def _unused_sections(task: Any, recipe: Recipe) -> list[str]:
    """Sections that a task of the user's own makes idle, which they may not expect."""
    idle = []
    if hasattr(task, "datasets") and recipe.data is not None and recipe.data.name != OF_TASK:
        idle.append(f"data: {recipe.data.name} is not used, because {recipe.task.name} has datasets() of its own")
    if hasattr(task, "model") and recipe.model is not None:
        idle.append(f"model: {recipe.model.name} is not used, because {recipe.task.name} has model() of its own")
    return idle


def _odd_sizes(run: Training, built: _Built) -> list[str]:
    """What works but is seldom meant."""
    optim, train, found = run.recipe.optim, run.recipe.train, []
    if optim.warmup_steps >= run.plan.num_steps:
        found.append(f"optim.warmup_steps: {optim.warmup_steps} is not less than the run's {run.plan.num_steps} steps")
    if train.global_batch > built.order.num_samples:
        found.append(f"train.global_batch: {train.global_batch} is more than the {built.order.num_samples} samples")
    return found


def _datasets(task: Any, recipe: Recipe) -> Datasets:
    """The task's own datasets, or those of the data section."""
    if not hasattr(task, "datasets"):
        if recipe.data is None or recipe.data.name == OF_TASK:
            raise UserError(f"data: is required, because {recipe.task.name} has no method datasets()")
        found = build_datasets(recipe.data, recipe.train.seed)
    else:
        parts = task.datasets()
        if not isinstance(parts, Mapping) or "train" not in parts:
            raise UserError(f"task.name: datasets() of {recipe.task.name} should return {{'train': ..., 'val': ...}}")
        found = Datasets(parts["train"], parts.get("val"), DataSpec())
    found = Datasets(in_one_go(found.train), in_one_go(found.val), found.spec)
    for name, part in (("train", found.train), ("val", found.val)):
        if part is None and name == "val":
            continue
        if not hasattr(part, "__len__") or not (hasattr(part, "batch") or hasattr(part, "__getitem__")):
            raise UserError(f"data: the {name} dataset ({type(part).__name__}) needs __len__ and __getitem__")
        if len(part) == 0:
            raise UserError(f"data: the {name} dataset is empty")
    if found.val is None:
        for name, watched in (("early_stop", recipe.early_stop), ("checkpoint.metric", recipe.checkpoint.metric)):
            if watched is not None:
                raise UserError(f"{name}: needs a validation dataset, and there is none; add one or remove this")
    return found


def _model(task: Any, recipe: Recipe, spec: DataSpec) -> nn.Module:
    """The task's own model, or that of the model section."""
    if hasattr(task, "model"):
        model = task.model()
    elif recipe.model is not None:
        model = build_model(recipe.model, spec)
    else:
        raise UserError(f"model: is required, because {recipe.task.name} has no method model()")
    if not isinstance(model, nn.Module):
        raise UserError(f"task.name: model() of {recipe.task.name} returned {type(model).__name__}, not an nn.Module")
    if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        raise UserError("model: has lazy modules, whose shapes are not known yet; send one batch through it first")
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise UserError(f"model: {name} is extra state that a checkpoint cannot hold; keep it in a buffer")
    if not model.training:  # as `from_pretrained` hands models out; single modules in evaluation mode stay so
        model.train()
    return model


def step_settings(recipe: Recipe) -> StepSettings:
    """What of a recipe a strategy must know."""
    return StepSettings(
        optim=recipe.optim,
        precision=recipe.train.precision,
        compile=recipe.train.compile,
        clip_norm=recipe.train.clip_norm,
        activation_checkpointing=recipe.train.activation_checkpointing,
    )


def _start_facts(request: RunRequest, built: _Built, run: Training, world_size: int) -> dict[str, Any]:
    return {
        "run": request.run_dir.name,
        "startup_s": request.marks,
        "world_size": world_size,
        "parameters": built.num_parameters,
        "device": str(run.unit.device),
        "train_samples": len(built.datasets.train),
        "num_steps": run.plan.num_steps,
        "step": run.state.step,
        "global_batch": run.recipe.train.global_batch,
    }


def _worker_facts(process: Process) -> dict[str, Any]:
    device = str(process.device)
    name = torch.cuda.get_device_name(process.device) if process.device.type == "cuda" else "cpu"
    return {
        "rank": process.rank,
        "node": process.node,
        "pid": os.getpid(),
        "agent_pid": process.agent_pid,
        "host": socket.gethostname(),
        "address": process.address,
        "device": device,
        "device_name": name,
        "threads": torch.get_num_threads(),
    }
