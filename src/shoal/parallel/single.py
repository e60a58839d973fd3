"""One process on one device: the reference that every other strategy must agree with."""

from torch import nn

from shoal.core.batch import StepBatch
from shoal.core.errors import UserError
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.parallel.optimizer import set_lr
from shoal.parallel.recorded import RecordedStep
from shoal.parallel.replica import Replica
from shoal.parallel.unit import StepLoss, StepSettings, UnitState


class SingleUnit(Replica):
    """A model on one device."""

    whole_every = 1

    def __init__(self, model: nn.Module, objective: Objective, settings: StepSettings, process: Process) -> None:
        super().__init__(model, objective, settings, process)
        self.recorded: RecordedStep | None = None
        is_wanted = settings.cuda_graphs is True or (settings.cuda_graphs == "auto" and objective.is_traceable)
        if settings.cuda_graphs is True and process.device.type != "cuda":
            raise UserError("train.cuda_graphs: needs a GPU and this worker has none; leave it out")
        if process.device.type == "cuda" and is_wanted and self.scaler is None:
            self.recorded = RecordedStep(self, settings.cuda_graphs)

    def forward_backward(self, step: StepBatch) -> StepLoss:
        """Gradients of the mean loss over the step's items, summed over its micro-batches."""
        # What to divide by is known before the first forward pass, so that every backward adds its final share.
        expected = step.num_samples if self.objective.count is None else self.count(step)
        if expected == 0:
            raise UserError(
                "task.count found nothing to learn from in a whole step; check the data and train.global_batch"
            )
        if self.recorded is not None and (repeated := self.recorded.forward_backward(step, expected)) is not None:
            return repeated
        loss = self.accumulate(step, self.loss_of, lambda: expected)
        if self.objective.count is None:
            self.rescale_gradients(expected, loss.count)
        else:
            self.check_count(expected, loss.count)
        return loss

    def optimizer_step(self, lr: float) -> None:
        """Clip, update the weights, and clear the gradients."""
        if self.recorded is not None and self.recorded.is_pending:
            set_lr(self.optimizer, lr)
            self.recorded.update()
        else:
            super().optimizer_step(lr)

    def load(self, state: UnitState) -> None:
        """Take over a state."""
        super().load(state)
        if self.recorded is not None:
            self.recorded.forget()
