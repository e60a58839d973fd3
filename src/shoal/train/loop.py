"""THE loop. Read it top to bottom: there is nothing else that trains."""

from contextlib import closing

from shoal.train.report import check_window, count_items, evaluate_now, report_training
from shoal.train.schedule import learning_rate, peak_lr
from shoal.train.state import should_stop_early
from shoal.train.training import Training
from shoal.train.window import LossWindow


def run_loop(run: Training) -> str:
    """Train until done; returns why it ended: `done`, `early_stop`, `pause`, or what `stop` said."""
    plan, state, unit, clock = run.plan, run.state, run.unit, run.clock
    peak = peak_lr(run.recipe.optim, run.recipe.train.global_batch)
    window = LossWindow(state.window_loss, state.window_count)
    run.reported_samples, run.carried_items = state.samples, window.read_all(run.group)[1]
    unit.lap = clock.lap_within
    clock.lap("start")

    with closing(run.batches(state.step)) as batches, closing(run.profiler):
        while True:
            if plan.evaluation_pending(state.step, state.evaluated_step):
                evaluate_now(run)

            ending = _finished(run) or run.stop()
            if (ending or plan.save_due(state.step)) and run.saved_step != state.step:
                check_window(run, window)
                state.window_loss, state.window_count = window.read()
                run.checkpoints.save()
                run.saved_step = state.step
                clock.lap("checkpoint")
            if ending:
                count_items(run, window.read_all(run.group)[1])
                run.data.report()
                run.checkpoints.finish(ending)
                clock.lap("checkpoint")
                return ending

            batch = next(batches)
            clock.lap("data")
            lr = learning_rate(run.recipe.optim, peak, state.step, plan.num_steps)
            loss = unit.forward_backward(batch)
            clock.lap("backward")
            unit.optimizer_step(lr)
            clock.lap("optimizer")

            state.step += 1
            state.samples += batch.num_samples
            window.add(loss)
            run.first_step_s = run.first_step_s or clock.elapsed_s
            run.observer.tick(state.step)
            if plan.report_due(state.step):
                report_training(run, window, lr)
                window = LossWindow()
                clock.lap("report")
            if run.profiler.after_step(state.step):
                clock.lap("report")


def _finished(run: Training) -> str | None:
    step = run.state.step
    is_done = step >= run.plan.num_steps
    if (is_done or run.plan.is_pause(step)) and not run.plan.evaluation_pending(step, run.state.evaluated_step):
        return "done" if is_done else "pause"
    return "early_stop" if should_stop_early(run.state, run.recipe.early_stop) else None
