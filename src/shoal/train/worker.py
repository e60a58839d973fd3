"""One process of a run, from recipe to summary: the only place where things are put together."""

import collections
import contextlib
import dataclasses
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from shoal.checkpoint.folder import clear_leftovers
from shoal.checkpoint.saver import TROUBLE, Saver
from shoal.checkpoint.store import check_unused, remote_of
from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.compile_cache import kept_compiled
from shoal.core.errors import RunError, UserError
from shoal.core.group import by_network
from shoal.core.memory import keep_freed_memory
from shoal.core.process import Process, pinned
from shoal.core.waits import noticed
from shoal.core.weights import weights_sha256
from shoal.data.loader import Evaluation
from shoal.observe.clock import Clock
from shoal.observe.records import Observer, Observers, Report
from shoal.observe.run_folder import RunFolder
from shoal.observe.runs import read_events
from shoal.observe.system import SystemWatch
from shoal.parallel.build import choose_strategy
from shoal.parallel.numerics import torch_settings
from shoal.parallel.unit import TrainUnit
from shoal.recipe.schema import Recipe
from shoal.train.agree import AgreedStop
from shoal.train.announce import announce, worker_facts
from shoal.train.beside import Beside
from shoal.train.build import Built, build
from shoal.train.circumstances import circumstances_of
from shoal.train.compile_watch import compiling_seen
from shoal.train.data_watch import DataWatch
from shoal.train.end import end_event, end_run, tell_of_workers
from shoal.train.failure import in_words
from shoal.train.hardware import for_workers
from shoal.train.initial import Initial, fill
from shoal.train.loop import run_loop
from shoal.train.memory_snapshot import memory_history, snapshot_on_oom
from shoal.train.plan import Plan, check_whole, make_plan
from shoal.train.profiling import make_profiler
from shoal.train.request import RunRequest
from shoal.train.restore import Restored, on_first, restore_newest
from shoal.train.save import Checkpoints
from shoal.train.settle import Settled, settle
from shoal.train.state import TrainState
from shoal.train.summary import Origin, summarise
from shoal.train.training import Training
from shoal.train.vitals import Vitals

_ONE_RUN = threading.Lock()
_SETTLE_S = 60.0
"""How long a run that fails waits for a checkpoint that is being written."""


def train_worker(request: RunRequest, process: Process) -> dict[str, Any]:
    """Build everything, train, and return the summary. Nothing is written before all is built."""
    process = dataclasses.replace(process, tell=lambda words: request.console.event("starting", {"what": words}))
    recipe = for_workers(request.loaded.recipe, process)
    threads = recipe.cluster.threads_per_worker or request.threads
    settings = torch_settings(
        precision=recipe.train.precision,
        deterministic=recipe.train.deterministic,
        threads=threads,
        device=process.device,
        gpu_memory_fraction=recipe.cluster.gpu_memory_share,
        gpu_allocator=recipe.cluster.gpu_allocator,
    )
    pinning = pinned(process, threads) if recipe.cluster.pin_cores else contextlib.nullcontext()
    if process.device.type == "cpu":
        keep_freed_memory()
    if not _ONE_RUN.acquire(blocking=False):
        raise UserError("a run is going on in this process; random generators are shared, so start the other elsewhere")
    try:
        with (
            settings,
            pinning,
            kept_compiled(),
            _joined_to_ray(recipe),
            memory_history(process.device, recipe.observe.profile is not None),
        ):
            settled = settle(recipe, process, request.run_dir)
            built = build(settled.recipe, process)
            request.marks["built"] = round(time.time() - request.started, 3)
            return _train(request, built, settled, process)
    except (RuntimeError, MemoryError, OSError) as error:
        raise in_words(error, request.run_dir, recipe.micro_batch(process.world_size)) from error.__cause__
    finally:
        _ONE_RUN.release()


def _joined_to_ray(recipe: Recipe) -> contextlib.AbstractContextManager[Any]:
    """Where Ray reads the data: connected before the user's code is, which would start a Ray of its own."""
    if recipe.data is None or recipe.data.loader != "ray":
        return contextlib.nullcontext()
    from shoal.data.ray_data import connected

    return connected()


def _train(request: RunRequest, built: Built, settled: Settled, process: Process) -> dict[str, Any]:
    """Take over or make the run's folder, say what starts, and run the loop."""
    group = process.group
    folder = RunFolder(request.run_dir)
    beside = Beside(built.recipe, request.run_dir, process.is_first)
    seen_by = (folder, request.console, *beside.observers) if process.is_first else ()
    observer = Observers(_FirstStep(request.on_first_step), *seen_by)
    clock = _clock(built.recipe, process)
    is_made_here = False
    try:
        built = _telling(built, request, observer, process, clock)
        restored = _restore(request, built, folder, process)
        if restored.checkpoint is None and (init_from := request.loaded.recipe.train.init_from) is not None:
            restored.told.append(("initial_weights", _fill(built, init_from, process).to_record()))
        restored.told[:0] = settled.told
        saver = _saver(request, built, folder, observer, process)
        evaluation = built.validation() if built.datasets.val is not None else None
        run = _assemble(request, built, evaluation, restored, saver, observer, process, clock)
        if run.state.step > run.plan.num_steps:
            raise UserError(
                f"train: the run is at step {run.state.step} already, beyond the {run.plan.num_steps} steps asked for; "
                "raise train.steps or train.epochs"
            )
        check_whole(run.plan, built.unit.whole_every)
        on_first(group, lambda: folder.open(run.state.step if request.resume else None))
        is_made_here = not request.resume and process.is_first
        workers = group.gather(worker_facts(process))
        beside.open(observer)
        if process.is_first:
            announce(folder, request, built, run, observer, restored, workers)
        beside.follow(observer)
        if saver.uploader is not None and restored.checkpoint is not None:
            saver.uploader.add_if_missing(restored.checkpoint.step)
    except BaseException:
        beside.close()
        folder.close()
        if is_made_here:  # nothing of a run that did not start stays behind
            shutil.rmtree(request.run_dir, ignore_errors=True)
        raise
    is_unused = False
    try:
        return _run_watched(run, request, folder, process, restored, saver, beside)
    except KeyboardInterrupt:
        is_unused = is_made_here and run.first_step_s is None
        raise
    finally:
        for opened in (evaluation, beside, folder):
            if opened is not None:
                opened.close()
        if is_unused:
            shutil.rmtree(request.run_dir, ignore_errors=True)


def _run_watched(
    run: Training,
    request: RunRequest,
    folder: RunFolder,
    process: Process,
    restored: Restored,
    saver: Saver,
    beside: Beside,
) -> dict[str, Any]:
    """The run, and what follows it for those who watch."""
    try:
        summary = _run(run, request, folder, process, restored, saver)
    except Exception:
        if not request.supervised:  # else the launcher says how it ended
            beside.conclude(run.observer, request.stop)
        raise
    if summary["ended_by"] not in ("preemption", "resize"):  # after which the run goes on, elsewhere and soon
        beside.conclude(run.observer, request.stop)
    return summary


def _clock(recipe: Recipe, process: Process) -> Clock:
    marks = None
    if process.device.type == "cuda":
        from shoal.observe.cuda_marks import CudaMarks

        marks = CudaMarks(process.device)
    return Clock(marks, is_split=recipe.observe.phases)


def _telling(built: Built, request: RunRequest, observer: Observer, process: Process, clock: Clock) -> Built:
    """The same, where what is waited for is shown; being asked is a sign of life, so a long wait is not a hang."""

    def tell(words: str) -> None:
        request.stop()
        if process.is_first:
            observer.event("data", {"message": words})
        else:
            print(words, file=sys.stderr, flush=True)

    feeding = built.feeding
    told = dataclasses.replace(
        feeding,
        train=dataclasses.replace(feeding.train, tell=tell, lap=clock.lap_within),
        val=dataclasses.replace(feeding.val, tell=tell),
    )
    return dataclasses.replace(built, feeding=told)


class _FirstStep:
    """An observer that calls a function after the first step."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def report(self, report: Report) -> None:
        """Nothing."""

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Nothing."""

    def tick(self, step: int) -> None:
        """A step is done."""
        if self._call is not None:
            call, self._call = self._call, None
            call()


def _restore(request: RunRequest, built: Built, folder: RunFolder, process: Process) -> Restored:
    """What the run goes on from; nothing where it is new, which is checked."""
    group, recipe = process.group, request.loaded.recipe
    if not request.resume:
        if any(group.gather(request.stop())):
            raise KeyboardInterrupt  # before the folder is made: nothing to save, nothing to resume
        if recipe.checkpoint.upload_to:
            on_first(group, lambda: check_unused(request.run_dir.name, recipe.checkpoint))
        return Restored()
    on_first(group, lambda: _take_over(folder, request))
    remote = remote_of(request.run_dir.name, recipe.checkpoint) if recipe.checkpoint.upload_to else None
    restored = restore_newest(folder.checkpoints, built.unit, process, built.identity, recipe.train.seed, remote)
    had_some = any(event.get("event") in ("save", "adopted") for event in read_events(request.run_dir))
    if restored.checkpoint is None and had_some:
        raise UserError(f"--resume: the checkpoints that this run had are gone from {folder.checkpoints}")
    return restored


def _fill(built: Built, init_from: str, process: Process) -> Initial:
    return fill(built.described, built.unit.take_weights, init_from, process)


def _take_over(folder: RunFolder, request: RunRequest) -> None:
    # After a restart the former rank 0 may still be dying, on a machine that nobody reaches.
    folder.lock(wait_s=60.0 if request.restarts else 0.5)
    clear_leftovers(folder.checkpoints)


def _saver(request: RunRequest, built: Built, folder: RunFolder, observer: Observer, process: Process) -> Saver:
    recipe = built.recipe
    return Saver(
        folder.checkpoints,
        recipe.checkpoint,
        process,
        strategy=choose_strategy(recipe.parallel, process.world_size),
        recipe=request.loaded.to_yaml(),
        tell=lambda name, fields: observer.event(name, request.hidden(fields)),
        alive=request.stop,
        on_saved=request.on_saved,
    )


def _assemble(
    request: RunRequest,
    built: Built,
    evaluation: Evaluation | None,
    restored: Restored,
    saver: Saver,
    observer: Observer,
    process: Process,
    clock: Clock,
) -> Training:
    recipe, order = built.recipe, built.order
    state, resumed = restored.state, restored.checkpoint
    plan = make_plan(recipe, order.steps_per_epoch, request.pause_at, built.unit.whole_every)

    def batches(step: int) -> Generator[StepBatch]:
        return built.batches(step, plan.num_steps)

    watched = (built.feeding.train.statistics, *([evaluation.loading.statistics] if evaluation is not None else []))

    def own_stop() -> str | None:
        return request.stop() or saver.trouble()

    stop = AgreedStop(own_stop, process.group)

    def validation() -> Iterator[MicroBatch]:
        stop.anew()  # a batch takes another time than a step
        assert evaluation is not None
        yield from evaluation.batches()
        stop.anew()

    evaluation_pending = plan.evaluation_pending(state.step, state.evaluated_step)
    return Training(
        recipe=recipe,
        plan=plan,
        state=state,
        unit=built.unit,
        batches=batches,
        validation=validation if evaluation is not None else None,
        items=built.objective.items,
        checkpoints=Checkpoints(saver, built.unit, state, process, built.identity, order),
        data=DataWatch(watched, process.group, observer),
        # What was resumed needs no saving again, unless its evaluation is still to come.
        saved_step=resumed.step if resumed is not None and not evaluation_pending else None,
        observer=observer,
        stop=_stop(own_stop, stop if process.world_size > 1 else own_stop, built.unit, state),
        group=process.group,
        clock=clock,
        vitals=_vitals(built, plan, process, clock),
        profiler=make_profiler(recipe.observe.profile, request.run_dir, process, observer, plan.num_steps),
    )


def _vitals(built: Built, plan: Plan, process: Process, clock: Clock) -> Vitals:
    recipe, device = built.recipe, process.device
    system = SystemWatch(device.index if device.type == "cuda" else None) if recipe.observe.phases else None
    return Vitals(process.group, clock, circumstances_of(built, plan, process), system, recipe.observe.workers_every_s)


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
    run: Training, request: RunRequest, folder: RunFolder, process: Process, restored: Restored, saver: Saver
) -> dict[str, Any]:
    """The loop and how it ended, written down whichever way that is."""
    resumed = restored.checkpoint
    origin = Origin(
        run_dir=request.run_dir,
        started=request.started,
        world_size=process.world_size,
        resumed_from_step=resumed.step if resumed else None,
        restarts=request.restarts,
        samples_before=run.state.samples,
        first_step_s=request.first_step_s,
        launch=request.launch,
    )
    is_watched = process.world_size > 1 and run.recipe.observe.phases
    try:
        waits = noticed(run.clock.begin_wait, run.clock.end_wait) if is_watched else contextlib.nullcontext()
        with waits, compiling_seen(run, process.rank):
            ending = run_loop(run)
        if ending == TROUBLE:
            words = saver.too_many_failures() or "checkpoints could not be kept for a while"
            raise RunError(f"{words}; stopped at step {run.state.step}, which is saved in {folder.checkpoints}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and run.first_step_s is None and (reason := request.stop()) is not None:
            if not request.resume:
                raise  # nothing of it stays behind
            return end_run(run, folder, process, origin, "interrupted", reason)
        if isinstance(error, Exception) and not by_network(error):  # without the others it cannot be committed
            saver.settle(_SETTLE_S)
        snapshot = snapshot_on_oom(error, request.run_dir, process.rank, process.device)
        failure = in_words(error, request.run_dir, run.recipe.micro_batch(run.unit.data_size), snapshot)
        if request.supervised:
            raise failure from error.__cause__
        message = request.loaded.hide(str(failure)) or type(failure).__name__
        with contextlib.suppress(OSError):  # the disk may be what failed
            facts = {"error": type(error).__name__, "message": message}
            tell_of_workers(run, folder)
            end = end_event(run, "failed") | facts
            folder.write_summary(summarise(run, origin, end) | {"error": message})
            run.observer.event("failed", end)
        raise failure from error.__cause__
    if ending == "early_stop":
        assert run.recipe.early_stop is not None
        watched = run.recipe.early_stop.metric
        run.observer.event("early_stop", {"step": run.state.step, "metric": watched, "best": run.state.best})
    status = "done" if ending in ("done", "early_stop") else "interrupted"
    weights = run.unit.full_weights()  # which all workers put together
    if not process.is_first:
        collections.deque(weights, maxlen=0)
        return {"status": status, "ended_by": ending}
    sha256 = weights_sha256(weights)
    run.clock.lap("end")
    return end_run(run, folder, process, origin, status, ending, sha256)
