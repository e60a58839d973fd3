"""One process on one device: the reference that every other strategy must agree with."""

from shoal.core.batch import StepBatch
from shoal.core.errors import UserError
from shoal.parallel.replica import Replica
from shoal.parallel.unit import StepLoss


class SingleUnit(Replica):
    """A model on one device."""

    whole_every = 1

    def forward_backward(self, step: StepBatch) -> StepLoss:
        """Gradients of the mean loss over the step's items, summed over its micro-batches."""
        # What to divide by is known before the first forward pass, so that every backward adds its final share.
        expected = step.num_samples if self.objective.count is None else self.count(step)
        if expected == 0:
            raise UserError(
                "task.count found nothing to learn from in a whole step; check the data and train.global_batch"
            )
        loss = self.accumulate(step, self.loss_of, lambda: expected)
        if self.objective.count is None:
            self.rescale_gradients(expected, loss.count)
        else:
            self.check_count(expected, loss.count)
        return loss
