"""Data parallel: every worker holds the whole model, and gradients are summed over all of them."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.core.batch import StepBatch
from shoal.core.errors import UserError
from shoal.core.objective import LossResult, Objective
from shoal.core.process import Process
from shoal.parallel.compress import register_hook
from shoal.parallel.replica import Replica
from shoal.parallel.section import ParallelSection
from shoal.parallel.unit import StepLoss, StepSettings, UnitState


class DdpUnit(Replica):
    """PyTorch's DistributedDataParallel around the task's whole loss.

    Around the loss rather than the model: a task may then call the model as often as it likes, and use its methods and
    attributes as in one process, and still every gradient is synchronised.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        settings: StepSettings,
        process: Process,
        section: ParallelSection,
    ) -> None:
        if section.sync_batch_norm:
            if process.device.type != "cuda":
                raise UserError("parallel.sync_batch_norm: PyTorch has it for GPUs only; turn it off on the CPU")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        super().__init__(model, objective, settings, process)
        self.whole_every = section.sync_every
        self.steps_apart = 0
        self.ddp = DistributedDataParallel(
            _Loss(self),
            bucket_cap_mb=section.bucket_mb,
            gradient_as_bucket_view=section.gradient_as_bucket_view,
            static_graph=section.static_graph,
            find_unused_parameters=section.find_unused_parameters,
        )
        if self.whole_every == 1 and not section.static_graph:
            self._arrange_buckets()
        register_hook(self.ddp, section, process)
        self.learns_graph = section.static_graph
        """A static graph is learnt in the first step, whose backward passes must all be seen."""

    def _arrange_buckets(self) -> None:
        """Have gradients put into the buckets that they keep from here on.

        PyTorch arranges them anew after the first backward pass, and with three workers or more the place of a gradient
        decides in which order it is added up. So that pass comes now, over nothing: the first step after a resume then
        gives the very bits that the same step gives in a run that was never stopped.
        """
        self.ddp(_NOTHING).backward()
        self.optimizer.zero_grad(set_to_none=True)

    def forward_backward(self, step: StepBatch) -> StepLoss:
        """Gradients of the mean loss over the items of the whole step, on every worker the same."""
        if self.whole_every > 1:
            return self._forward_backward_apart(step)
        before_last = contextlib.nullcontext if self.learns_graph else self.ddp.no_sync
        self.learns_graph = False
        return self.accumulate_over_workers(step, self.ddp, before_last)

    def _backward(self, loss: torch.Tensor) -> None:
        """What is waited for when all gradients are computed is communication that nothing hides."""
        is_synced = self.whole_every == 1 and self.ddp.require_backward_grad_sync
        if is_synced:
            # Asked for when the pass begins, so before PyTorch asks for its own, which waits for the sums.
            loss.register_hook(lambda gradient: _when_done(lambda: self.lap("backward")))  # type: ignore[no-untyped-call]
        super()._backward(loss)
        if is_synced:
            self.lap("comm")

    def _forward_backward_apart(self, step: StepBatch) -> StepLoss:
        """Local SGD: this worker's own mean gradient, which nobody else sees."""
        self.buffers_differ = True
        expected = max(_samples(step) if self.objective.count is None else self.count(step), 1)
        return self.accumulate(step, self.loss_of, lambda: expected)

    def optimizer_step(self, lr: float) -> None:
        """Update the weights; where workers go apart, bring them together when it is time."""
        super().optimizer_step(lr)
        if self.whole_every > 1:
            self.steps_apart += 1
            if self.steps_apart == self.whole_every:
                self._average()
                self.steps_apart = 0

    def _average(self) -> None:
        """Weights and optimizer state become the mean over all workers: from here on all are the same again."""
        for tensor in self.state().tensors.values():
            assert isinstance(tensor, torch.Tensor)
            if not tensor.is_floating_point():
                continue
            dist.all_reduce(tensor)
            tensor.div_(self.world_size)

    def load(self, state: UnitState) -> None:
        """Take over a state."""
        super().load(state)
        self.steps_apart = 0


_NOTHING = object()
"""Stands for a batch without anything in it."""


class _Loss(nn.Module):
    """The task's loss as a module, so that its forward pass is the one that DistributedDataParallel sees."""

    def __init__(self, unit: Replica) -> None:
        super().__init__()
        self.model = unit.model
        self.loss_of = unit.loss_of

    def forward(self, batch: Any) -> LossResult:
        """The loss; that of `_NOTHING` is zero, and its gradients come last parameter first, as they mostly do."""
        if batch is _NOTHING:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            return sum(
                (parameter.sum().float() * 0.0 for parameter in trained), torch.zeros((), device=trained[0].device)
            )
        return self.loss_of(batch)


def _when_done(call: Callable[[], None]) -> None:
    """Have it called when the backward pass that goes on here has computed everything."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _samples(step: StepBatch) -> int:
    return sum(micro.num_samples for micro in step.microbatches)
