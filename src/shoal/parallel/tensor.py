"""Tensor and sequence parallel: workers share every layer, and groups of them the samples of a step."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.objective import Measured, Objective
from shoal.core.parts import is_distributed
from shoal.core.process import Process
from shoal.core.weights import named_weights
from shoal.parallel.gradients import align_gradients, average_gradients
from shoal.parallel.hooks import refuse_gradient_hooks
from shoal.parallel.host_sums import HostSums
from shoal.parallel.mesh import COPIES, SHARDS, TENSOR, build_mesh, on_whole_mesh
from shoal.parallel.replica import Replica
from shoal.parallel.same_used import SameUsed
from shoal.parallel.section import ParallelSection
from shoal.parallel.sharding import fill, shard_model, without_reduction
from shoal.parallel.tensor_plan import read_plan
from shoal.parallel.tensor_styles import divide_layers
from shoal.parallel.ties import tie_again, tied_names
from shoal.parallel.unit import StepLoss, StepSettings, UnitState


class TensorUnit(Replica):
    """PyTorch's tensor parallel by the model's own plan. Groups average gradients, or divide their parts by FSDP2.

    Every worker of a group computes the whole loss of the same samples, and the first of them tells it.
    """

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
        mesh = build_mesh(section, "tensor", process)
        plan = read_plan(model, mesh.degrees.tensor, process.world_size)
        group, data = mesh.part(TENSOR), mesh.part(COPIES, SHARDS)
        sequence = section.tensor.sequence and plan.can_divide_tokens
        if group is not None:
            divide_layers(model, plan, group, sequence)
        keep_on = process.device
        self.is_sharded = section.tensor.across == "fsdp" and data is not None
        if self.is_sharded:
            assert data is not None
            shard_model(model, data, section.fsdp, settings, process.device)
            keep_on = torch.device("cpu") if section.fsdp.cpu_offload else process.device
        _place(model, initial, keep_on, process.device)
        super().__init__(model, objective, settings, process, is_divided=True)
        self.host_sums = HostSums(self.parameters, process.device)
        self.adding_up = self.host_sums.step
        self.before_last: Callable[[], AbstractContextManager[None]] = self.host_sums.before_last
        if self.is_sharded and not section.fsdp.reduce_every_micro_batch:
            self.before_last = partial(without_reduction, model)
        self.same_used = SameUsed(self.group, self.names, instead="parallel.tensor.across=ddp")
        self.mesh = mesh
        self.data_rank, self.data_size = mesh.data_rank, mesh.degrees.data
        self.random_rank = process.rank - mesh.tensor_rank
        self.bucket_bytes = int(section.bucket_mb * 2**20)
        _separate_meshes(self.optimizer)
        self.to_average = [
            (side, parameters)
            for side in (COPIES, SHARDS, TENSOR)
            if mesh.part(side) is not None and (parameters := [p for p in self.parameters if not _is_done(p, side)])
        ]
        """Sides of the block of workers, and the parameters whose gradients nobody else averages along them."""
        self.of_own_tokens = plan.of_tokens if sequence else frozenset()

    def forward_backward(self, step: StepBatch) -> StepLoss:
        """Gradients of the mean loss over the items of the whole step, on every worker those of its part."""
        self.same_used.check()
        loss = self.accumulate_over_workers(step, self.loss_of, self.before_last)
        if self.is_sharded:
            self.same_used.ask(self.parameters)
        align_gradients(self.parameters)
        for side, parameters in self.to_average:
            part = self.mesh.part(side)
            assert part is not None
            # Of its own tokens, each worker has a part of a gradient; of all, the same as the others. Taken from all of
            # them even so: should a kernel of a GPU not add up in one order, they would go apart bit by bit.
            summed = [side == TENSOR and self.names[parameter] in self.of_own_tokens for parameter in parameters]
            average_gradients(parameters, summed, part.get_group(), self.bucket_bytes, self.device)
        return loss if self.mesh.tensor_rank == 0 else StepLoss([], 0)

    def evaluate(self, batch: MicroBatch) -> Measured:
        """The task's metrics on one batch, told by the first worker of a group."""
        measured = super().evaluate(batch)
        return measured if self.mesh.tensor_rank == 0 else {}

    def state(self) -> UnitState:
        """As one process has it; of what is divided, the part that is here. Nothing that must not be kept."""
        self.same_used.check()
        state = super().state()
        tensors = {
            name: on_whole_mesh(held, self.mesh) if is_distributed(held) else held
            for name, held in state.tensors.items()
        }
        return UnitState(tensors, state.values, state.of_first)

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight as a whole, in the order of their names."""
        for name, tensor in sorted(named_weights(self.model).items()):
            yield name, _whole(tensor, self.device) if is_distributed(tensor) else tensor


def _place(
    model: nn.Module, initial: Iterable[tuple[str, torch.Tensor]] | None, keep_on: torch.device, device: torch.device
) -> None:
    """Put weights where they are kept, buffers where the model computes."""
    if initial is not None:
        # Once more than `fill` does it: parameters that are on the device already stay the same ones, tied as they are.
        ties = tied_names(model)
        model.to_empty(device=keep_on)
        tie_again(model, ties)
        fill(model, initial, keep_on)
    elif keep_on == device:
        model.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _whole(tensor: DTensor, device: torch.device) -> torch.Tensor:
    """Gathered on the device, where workers can talk; from one side after the other, as PyTorch does with a warning."""
    tensor = cast("DTensor", tensor.to(device))
    placements = list(tensor.placements)
    for side in range(len(placements)):
        placements[side] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _is_done(parameter: nn.Parameter, side: str) -> bool:
    """Whether a gradient needs no averaging along a side: FSDP does it, or every worker there has a part of its own."""
    if not is_distributed(parameter):
        return False
    placed = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
    if side == TENSOR:
        return not isinstance(placed.get(TENSOR, Replicate()), Replicate)
    return COPIES in placed or SHARDS in placed


def _separate_meshes(optimizer: torch.optim.Optimizer) -> None:
    """Groups of parameters that are divided over the same workers: PyTorch's kernels take no others at once."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        alike: dict[Any, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            alike.setdefault(parameter.device_mesh if is_distributed(parameter) else None, []).append(parameter)
        groups += [{**group, "params": parameters} for parameters in alike.values()]
    optimizer.param_groups[:] = groups
