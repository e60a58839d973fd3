"""Fully sharded data parallel: every worker holds a part of each tensor, and gathers a block's when it computes it."""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from shoal.core.batch import StepBatch
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.parallel.mesh import COPIES, SHARDS, build_mesh
from shoal.parallel.replica import Replica
from shoal.parallel.section import ParallelSection
from shoal.parallel.sharding import fill, shard_model, undivided, without_reduction
from shoal.parallel.unit import StepLoss, StepSettings


class FsdpUnit(Replica):
    """PyTorch's FSDP2 (`fully_shard`) on each repeated block and on the whole model."""

    whole_every = 1

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        settings: StepSettings,
        process: Process,
        section: ParallelSection,
        initial: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        mesh = build_mesh(section, "fsdp", process)
        part = mesh.part(COPIES, SHARDS)
        assert part is not None
        shard_model(model, part, section.fsdp, settings, process.device)
        if initial is not None:
            fill(model, initial, torch.device("cpu") if section.fsdp.cpu_offload else process.device)
        self.kept = undivided(model)
        """Every worker has them whole. Those of a model that was on the meta device are others than before."""
        _move_undivided(model, self.kept, process.device)
        super().__init__(model, objective, settings, process, is_divided=True)
        self.before_last: Callable[[], AbstractContextManager[None]] = (
            contextlib.nullcontext if section.fsdp.reduce_every_micro_batch else partial(without_reduction, model)
        )

    def forward_backward(self, step: StepBatch) -> StepLoss:
        """Gradients of the mean loss over the items of the whole step, on every worker those of its part."""
        loss = self.accumulate_over_workers(step, self.loss_of, self.before_last)
        for parameter in self.kept:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(self.world_size)
        return loss


def _move_undivided(model: nn.Module, kept: list[nn.Parameter], device: torch.device) -> None:
    """Where the model computes; what is offloaded are divided parameters alone."""
    for parameter in kept:
        parameter.data = parameter.data.to(device)
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]
