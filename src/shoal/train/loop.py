"""THE loop. Read it top to bottom: there is nothing else that trains."""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.errors import RunError
from shoal.core.group import Group
from shoal.observe.clock import Clock
from shoal.observe.records import Observer, Report
from shoal.parallel.unit import TrainUnit
from shoal.recipe.schema import Recipe
from shoal.train.data_watch import DataWatch
from shoal.train.evaluate import check_watched, evaluate, named_for_validation
from shoal.train.plan import Plan
from shoal.train.save import Saving
from shoal.train.schedule import learning_rate, peak_lr
from shoal.train.state import TrainState, note_evaluation, should_stop_early
from shoal.train.window import LossWindow

STEPPING = ("data", "forward_backward", "optimizer")
"""The phases that a rate is measured over."""


@dataclass
class Training:
    """Everything one run needs, built by the worker."""

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
    group: Group = field(default_factory=Group)
    """All workers of the run."""
    clock: Clock = field(default_factory=Clock)
    items_done: int = 0
    """Samples or tokens trained on, by all workers since this start."""
    carried_items: int = 0
    """Of what the next report counts, what was trained on before this start."""
    reported_samples: int = 0
    reported_stepping_s: float = 0.0
    first_step_s: float | None = None
    """Seconds by the clock when the first step was done."""


def run_loop(run: Training) -> str:
    """Train until done; returns why it ended: `done`, `early_stop`, or what `stop` said."""
    plan, state, unit, clock = run.plan, run.state, run.unit, run.clock
    peak = peak_lr(run.recipe.optim, run.recipe.train.global_batch)
    window = LossWindow(state.window_loss, state.window_count)
    run.reported_samples, run.carried_items = state.samples, window.read_all(run.group)[1]
    clock.lap("start")

    with closing(run.batches(state.step)) as batches:
        while True:
            if plan.evaluation_pending(state.step, state.evaluated_step):
                evaluate_now(run)

            ending = _finished(run) or run.stop()
            if (ending or plan.save_due(state.step)) and run.saved_step != state.step:
                _finite(run, window)
                state.window_loss, state.window_count = window.read()
                run.checkpoints.save()
                run.saved_step = state.step
                clock.lap("checkpoint")
            if ending:
                _count_items(run, window.read_all(run.group)[1])
                run.data.report()
                run.checkpoints.finish(ending)
                clock.lap("checkpoint")
                return ending

            batch = next(batches)
            clock.lap("data")
            lr = learning_rate(run.recipe.optim, peak, state.step, plan.num_steps)
            loss = unit.forward_backward(batch)
            clock.lap("forward_backward")
            unit.optimizer_step(lr)
            clock.lap("optimizer")

            state.step += 1
            state.samples += batch.num_samples
            window.add(loss)
            run.first_step_s = run.first_step_s or clock.elapsed_s
            run.observer.tick(state.step)
            if plan.report_due(state.step):
                total, count = _finite(run, window)
                report_training(run, total / max(count, 1), count, lr)
                window = LossWindow()
                clock.lap("report")


def evaluate_now(run: Training) -> None:
    """Go through the validation set and report; an interruption leaves the evaluation for the resumed run."""
    if run.validation is not None:
        found = evaluate(run.unit, run.validation(), run.stop, run.recipe.train.seed, run.group)
        run.clock.lap("evaluate")
        if found is None:
            return
        metrics = named_for_validation(found, run.items)
        check_watched(run.recipe, metrics)
        run.state.metrics |= metrics
        note_evaluation(run.state, run.recipe.early_stop)
        state, seconds = run.state, run.clock.since_report()
        run.observer.report(Report(state.step, run.plan.epoch(state.step), metrics, seconds, state.samples))
    run.state.evaluated_step = run.state.step


def report_training(run: Training, loss: float, count: int, lr: float) -> None:
    """A line of training metrics: loss, learning rate, rate, and what the strategy adds."""
    seconds = run.clock.since_report()
    # Not from `seconds`: an evaluation since the last report has taken the steps before it into a report of its own.
    total_s = sum(run.clock.total_s.get(phase, 0.0) for phase in STEPPING)
    stepping_s = max(total_s - run.reported_stepping_s, 1e-9)
    run.reported_stepping_s = total_s
    metrics = {"train_loss": loss, "lr": lr, **run.unit.report(), **run.checkpoints.report(), **run.data.report()}
    metrics["samples_per_s"] = (run.state.samples - run.reported_samples) / stepping_s
    items = _count_items(run, count)
    if run.items != "samples":
        metrics[f"{run.items}_per_s"] = items / stepping_s
    run.reported_samples = run.state.samples
    run.state.metrics["train_loss"] = loss
    run.state.reported_step = run.state.step
    run.observer.report(Report(run.state.step, run.plan.epoch(run.state.step), metrics, seconds, run.state.samples))


def _count_items(run: Training, count: int) -> int:
    """Of the samples or tokens of a window, those since this start."""
    done, run.carried_items = count - run.carried_items, 0
    run.items_done += done
    return done


def _finished(run: Training) -> str | None:
    if (step := run.state.step) >= run.plan.num_steps and not run.plan.evaluation_pending(
        step, run.state.evaluated_step
    ):
        return "done"
    return "early_stop" if should_stop_early(run.state, run.recipe.early_stop) else None


def _finite(run: Training, window: LossWindow) -> tuple[float, int]:
    total, count = window.read_all(run.group)
    if not math.isfinite(total):
        raise RunError(
            f"train loss became {total} after step {run.state.reported_step} and by step {run.state.step}: "
            f"lower optim.lr (now {run.recipe.optim.lr:g}), raise optim.warmup_steps or set train.clip_norm=1.0"
            + ("; fp16 overflows easily, so try train.precision=bf16" if run.recipe.train.precision == "fp16" else "")
        )
    return total, count
