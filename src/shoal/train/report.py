"""What the loop tells while it goes: training metrics, and those of an evaluation. Over all workers, always."""

import math
import time

from shoal.core.errors import DivergedError
from shoal.observe.phases import STEPPING
from shoal.observe.records import Report
from shoal.train.evaluate import check_watched, evaluate, named_for_validation
from shoal.train.state import note_evaluation
from shoal.train.training import Training
from shoal.train.vitals import Told
from shoal.train.window import LossWindow


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
        _tell(run, metrics, run.vitals.exchange())
        run.clock.lap("report")
    run.state.evaluated_step = run.state.step


def report_training(run: Training, window: LossWindow, lr: float) -> None:
    """A line of training metrics over all workers: loss, learning rate, rate, and what the strategy adds."""
    began = time.perf_counter()
    own = window.read()
    run.vitals.ahead_s += time.perf_counter() - began  # for so long the device had something to do still
    by_strategy = run.unit.report()
    told = run.vitals.exchange(*own, *by_strategy.values(), *run.data.own())
    total, count, *others = told.sums()
    _check_finite(run, total)
    strategy = {name: value / len(told.own) for name, value in zip(by_strategy, others, strict=False)}
    # Not from what was told: an evaluation since the last report has taken the steps before it into one of its own.
    total_s = sum(run.clock.total_s.get(phase, 0.0) for phase in STEPPING)
    stepping_s = max(total_s - run.reported_stepping_s, 1e-9)
    run.reported_stepping_s = total_s
    loss = total / max(count, 1)
    data = run.data.take(others[len(strategy) :])
    metrics = {"train_loss": loss, "lr": lr, **strategy, **run.checkpoints.report(), **data}
    metrics["samples_per_s"] = (run.state.samples - run.reported_samples) / stepping_s
    items = count_items(run, int(count))
    if run.items != "samples":
        metrics[f"{run.items}_per_s"] = items / stepping_s
    run.reported_samples = run.state.samples
    run.state.metrics["train_loss"] = loss
    run.state.reported_step = run.state.step
    _tell(run, metrics, told)


def _tell(run: Training, metrics: dict[str, float], told: Told) -> None:
    state = run.state
    epoch = run.plan.epoch(state.step)
    run.observer.report(Report(state.step, epoch, metrics, told.seconds, state.samples, workers=told.workers))


def count_items(run: Training, count: int) -> int:
    """Of the samples or tokens of a window, those since this start."""
    done, run.carried_items = count - run.carried_items, 0
    run.items_done += done
    return done


def check_window(run: Training, window: LossWindow) -> None:
    """Raise where the loss is no number any more; every worker must ask."""
    _check_finite(run, window.read_all(run.group)[0])


def _check_finite(run: Training, total: float) -> None:
    if not math.isfinite(total):
        raise DivergedError(
            f"train loss became {total} after step {run.state.reported_step} and by step {run.state.step}: "
            f"lower optim.lr (now {run.recipe.optim.lr:g}), raise optim.warmup_steps or set train.clip_norm=1.0"
            + ("; fp16 overflows easily, so try train.precision=bf16" if run.recipe.train.precision == "fp16" else "")
        )
