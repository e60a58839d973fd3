"""The losses of one step's micro-batches, which the last worker of a pipeline computes as their outputs arrive."""

from collections.abc import Sequence
from typing import Any

import torch

from shoal.core.batch import MicroBatch
from shoal.core.errors import UserError
from shoal.core.objective import Count, check_loss
from shoal.core.rng import derive_seed, isolated_rng
from shoal.parallel.replica import Replica
from shoal.parallel.stand_in import Inputs, answer, nothing_of


class StepLosses:
    """One step; what it has come to is told when all outputs were seen."""

    def __init__(
        self,
        unit: Replica,
        micros: Sequence[MicroBatch],
        batches: Sequence[Any],
        inputs: list[Inputs],
        expected: int,
        seed: int,
    ) -> None:
        """Args:
        unit: Whose model it is.
        micros: The micro-batches, all with samples.
        batches: Their data, on the device of a worker that computes with it.
        inputs: What the task calls the model with, for each.
        expected: Items of the whole step, over all pipelines.
        seed: Of what the task draws, together with the number of the micro-batch.
        """
        self.unit = unit
        self.micros = micros
        self.batches = batches
        self.inputs = inputs
        self.expected = expected
        self.seed = seed
        self.terms: list[tuple[torch.Tensor, int]] = []
        self.total: Count = 0
        self.error: UserError | None = None
        """What is wrong with the task; the step goes on, because the other workers do."""
        self._number = 0

    def alike_inputs(self) -> list[Inputs]:
        """Checked to be of samples of one shape: others would go through the pipeline one by one."""
        kinds = {tuple((tuple(tensor.shape[1:]), tensor.dtype) for tensor in each) for each in self.inputs}
        if len(kinds) > 1:
            shapes = " and ".join(str([shape for shape, _ in kind]) for kind in sorted(kinds, key=str)[:2])
            raise UserError(
                f"data: the samples of one step have shapes {shapes} in different micro-batches; a pipeline needs them "
                "of one shape, so pad them to the same length"
            )
        return self.inputs

    def share(self, output: Any) -> torch.Tensor:
        """What of the next micro-batch goes into the gradient."""
        number = self._number
        self._number += 1
        if self.error is None:
            try:
                return self._share(number, output)
            except UserError as error:
                self.error = error
        return nothing_of(output)

    def _share(self, number: int, output: Any) -> torch.Tensor:
        unit, batch = self.unit, self.batches[number]
        with unit.autocast, isolated_rng(derive_seed(self.seed, number), unit.device):
            loss = answer(lambda model: unit.objective.loss(model, batch), unit.model, "task.loss", output)
        check_loss(loss, trains=True)
        unit.returns_sums = isinstance(loss, tuple)
        share, term, count = unit.share(loss, self.micros[number].num_samples, self.expected, 1)
        if term is not None:
            self.terms.append(term)
        self.total = self.total + count
        return unit.scaler.scale(share) if unit.scaler is not None else share
