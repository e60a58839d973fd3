"""Fully sharded data parallel: every worker holds a part of each tensor, and gathers a block's when it computes it."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from shoal.core.batch import StepBatch
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.parallel.hooks import refuse_gradient_hooks
from shoal.parallel.host_sums import HostSums
from shoal.parallel.mesh import COPIES, SHARDS, build_mesh
from shoal.parallel.replica import Replica
from shoal.parallel.same_used import SameUsed
from shoal.parallel.section import ParallelSection
from shoal.parallel.sharding import fill, shard_model, undivided, without_reduction
from shoal.parallel.unit import StepLoss, StepSettings, UnitState


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
        refuse_gradient_hooks(model)
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
        self.same_used = SameUsed(
            self.group, self.names, instead="parallel.strategy=ddp with parallel.find_unused_parameters=true"
        )
        self.host_sums = HostSums(self.parameters, process.device)
        self.adding_up = self.host_sums.step
        self.before_last: Callable[[], AbstractContextManager[None]] = (
            self.host_sums.before_last if section.fsdp.reduce_every_micro_batch else partial(without_reduction, model)
        )

    def forward_backward(self, step: StepBatch) -> StepLoss:
        """Gradients of the mean loss over the items of the whole step, on every worker those of its part."""
        self.same_used.check()
        loss = self.accumulate_over_workers(step, self.loss_of, self.before_last)
        self.same_used.ask(self.parameters)
        _average(self.kept, self.world_size)
        return loss

    def state(self) -> UnitState:
        """As of one process, of which each worker has its part; nothing that must not be kept."""
        self.same_used.check()
        return super().state()


def _average(kept: list[nn.Parameter], world_size: int) -> None:
    """Gradients of what every worker holds whole; one without gives zeros, and where all are without it stays so."""
    if not kept:
        return
    zero = torch.zeros((), dtype=torch.float64, device=kept[0].device)
    gradients = [zero if p.grad is None else p.grad.double() for p in kept]
    used = [zero if p.grad is None else zero + 1 for p in kept]
    summed = torch.stack([*gradients, *used])
    dist.all_reduce(summed)
    for parameter, total, users in zip(kept, summed[: len(kept)], summed[len(kept) :].tolist(), strict=True):
        parameter.grad = (total / world_size).to(parameter.dtype) if users else None


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
