"""What is due when: the numbers of a run that follow from its recipe and the size of its data."""

import math
from dataclasses import dataclass

from shoal.core.errors import UserError
from shoal.recipe.schema import Recipe


@dataclass(frozen=True)
class Plan:
    """Steps, in numbers."""

    num_steps: int
    steps_per_epoch: int
    evaluate_every: int
    save_every: int
    report_every: int
    pause_step: int | None = None
    """After this many steps the run is evaluated, saved and ends, to be gone on with later."""

    def epoch(self, step: int) -> float:
        """Passes over the data after this many steps."""
        return step / self.steps_per_epoch

    def evaluation_due(self, step: int) -> bool:
        """After this many steps, go through the validation set."""
        return step in (self.num_steps, self.pause_step) or (step > 0 and step % self.evaluate_every == 0)

    def is_pause(self, step: int) -> bool:
        """After this many steps, end for now."""
        return self.pause_step is not None and step >= self.pause_step

    def evaluation_pending(self, step: int, evaluated_step: int) -> bool:
        """The evaluation that is due has not been done yet, or was broken off."""
        return self.evaluation_due(step) and evaluated_step < step

    def save_due(self, step: int) -> bool:
        """After this many steps, save."""
        return step == self.num_steps or (step > 0 and step % self.save_every == 0)

    def report_due(self, step: int) -> bool:
        """After this many steps, write a line of metrics; the first step too, so that a run shows signs of life."""
        return step in (1, self.num_steps) or step % self.report_every == 0


def make_plan(recipe: Recipe, steps_per_epoch: int, pause_at: float | None = None, whole_every: int = 1) -> Plan:
    """The plan of a run over data of `steps_per_epoch` steps.

    `pause_at`: where to end for now, in steps or epochs, as the recipe says how long to train; with the first step from
    there on of which the state is whole, which it is every `whole_every` steps.
    """
    train = recipe.train
    num_steps = train.steps if train.steps is not None else (train.epochs or 0) * steps_per_epoch
    pause_step = None
    if pause_at is not None:
        exact = pause_at if train.steps is not None else pause_at * steps_per_epoch
        pause_step = math.ceil(round(exact / whole_every, 6)) * whole_every
    return Plan(
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
        evaluate_every=recipe.evaluate.every_steps or steps_per_epoch,
        save_every=recipe.checkpoint.every_steps or steps_per_epoch,
        report_every=recipe.observe.every_steps,
        pause_step=pause_step if pause_step is not None and pause_step < num_steps else None,
    )


def check_whole(plan: Plan, whole_every: int) -> None:
    """Where workers go apart for `whole_every` steps, what needs them together must be due only then."""
    due = {
        "train.steps": plan.num_steps,
        "evaluate.every_steps": plan.evaluate_every,
        "checkpoint.every_steps": plan.save_every,
    }
    for name, steps in due.items():
        if steps % whole_every:
            raise UserError(
                f"{name}: {steps} is not a multiple of parallel.sync_every {whole_every}, after which all workers "
                f"hold the same weights; set {name}={-(-steps // whole_every) * whole_every}"
            )
