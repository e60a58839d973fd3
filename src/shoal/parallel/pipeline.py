"""Pipeline parallel: each worker holds some of the model's blocks, and micro-batches flow through all of them."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.errors import UserError
from shoal.core.objective import Count, Measured, Objective
from shoal.core.parts import FlatPart, Held
from shoal.core.process import Process
from shoal.core.rng import derive_seed, isolated_rng
from shoal.core.weights import named_weights
from shoal.parallel.clip import clip_gradients
from shoal.parallel.flow import Flow
from shoal.parallel.gradients import average_gradients
from shoal.parallel.hooks import refuse_gradient_hooks
from shoal.parallel.mesh import COPIES, STAGES, build_mesh
from shoal.parallel.optimizer import optimizer_tensors
from shoal.parallel.replica import Replica
from shoal.parallel.section import ParallelSection
from shoal.parallel.stage_loss import StepLosses
from shoal.parallel.stage_tensors import place
from shoal.parallel.stages import check_blocks, cut, holders, row_of
from shoal.parallel.stand_in import Inputs, answer, ask_for_inputs
from shoal.parallel.unit import StepLoss, StepSettings, UnitState


@dataclass(frozen=True)
class _Shared:
    """Weights that several workers hold, and who they are."""

    group: Any
    parameters: list[nn.Parameter]


class PipelineUnit(Replica):
    """torch.distributed.pipelining over stages that are cut from the model's blocks; several pipelines side by side
    sum their gradients.

    A weight of several stages (tied embeddings) is on each of their workers, and its gradient is summed over them.
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
        row, schedule = row_of(model), section.pipeline.schedule
        per_worker = section.pipeline.stages_per_worker if schedule == "interleaved" else 1
        size = section.pipeline.stages or process.world_size
        check_blocks(len(row.blocks), size, per_worker, process.world_size)
        mesh = build_mesh(section, "pipeline", process)
        stages = cut(model, row, size * per_worker)
        self.worker, self.copies = mesh.stage, mesh.degrees.copies
        self.holders = holders(stages, size)
        """Workers of a pipeline that hold each tensor."""
        self.own = frozenset(name for name, workers in self.holders.items() if self.worker in workers)
        place(model, self.own, process.device, initial)
        super().__init__(model, objective, dataclasses.replace(settings, compile=False), process, is_divided=True)
        if settings.compile:
            for stage in stages[self.worker :: size]:
                for block in stage.blocks:
                    block.compile()
        self.data_rank, self.data_size = mesh.data_rank, mesh.degrees.data
        copies, pipeline = mesh.part(COPIES), mesh.part(STAGES)
        assert copies is not None and pipeline is not None
        self.copies_mesh = copies
        self.shared = self._shared_groups()
        self._begin_alike()
        self.summed = self.shared + self._alone()
        self.bucket_bytes = int(section.bucket_mb * 2**20)
        self.flow = Flow(
            model,
            stages,
            self.worker,
            pipeline.get_group(),
            schedule=schedule,
            device=process.device,
            autocast=self.autocast,
        )
        self.knows_kind = False
        """Whether all workers know what kind of loss the task returns, and that nothing is wrong with it."""

    def _shared_groups(self) -> list[_Shared]:
        """Who sums the gradients of weights that several stages have. Every worker must call this."""
        trained = {self.names[parameter]: parameter for parameter in self.parameters}
        found = []
        for members in sorted({workers for workers in self.holders.values() if len(workers) > 1}):
            group = dist.new_group([worker * self.copies + copy for worker in members for copy in range(self.copies)])
            names = sorted(name for name, workers in self.holders.items() if workers == members and name in trained)
            if self.worker in members and names:
                found.append(_Shared(group, [trained[name] for name in names]))
        return found

    def _alone(self) -> list[_Shared]:
        """The weights of one stage, where there are several pipelines."""
        several = {id(parameter) for shared in self.shared for parameter in shared.parameters}
        alone = [parameter for parameter in self.parameters if id(parameter) not in several]
        return [_Shared(self.copies_mesh.get_group(), alone)] if self.copies > 1 and alone else []

    def _begin_alike(self) -> None:
        """Those who hold the same weights take the first one's, should a constructor draw numbers of its own."""
        if self.copies > 1:
            for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
                if name in self.own:
                    dist.broadcast(tensor.detach(), group=self.copies_mesh.get_group(), group_src=0)
        for shared in self.shared:
            for parameter in shared.parameters:
                dist.broadcast(parameter.detach(), group=shared.group, group_src=0)

    def forward_backward(self, step: StepBatch) -> StepLoss:
        """Gradients of the mean loss over the items of the whole step, on every worker those of its weights."""
        with self.buffers_alike():
            return self._forward_backward(step)

    def _forward_backward(self, step: StepBatch) -> StepLoss:
        # Those without samples are left out: a pipeline needs none to keep in step, not even a single one.
        micros = [micro for micro in step.microbatches if micro.num_samples]
        counted = self.count(step) if self.objective.count is not None and self.flow.is_last else 0
        total, seed = self._agree(counted)
        expected = step.num_samples if self.objective.count is None else total
        if expected == 0:
            raise UserError(
                "task.count found nothing to learn from in a whole step; check the data and train.global_batch"
            )
        batches = [self.to_device(micro.data) if self._computes_loss else micro.data for micro in micros]
        with self.autocast:
            inputs = [self._inputs(batch, derive_seed(seed, number)) for number, batch in enumerate(batches)]
        losses = StepLosses(self, micros, batches, inputs, expected, seed)
        self.flow.train(losses.alike_inputs(), losses.share)
        self._check(losses, counted)
        self._rescale(step, losses.total)
        self._sum_gradients()
        self.lap("forward_backward")
        return StepLoss(losses.terms, losses.total) if self.flow.is_last else StepLoss([], 0)

    @property
    def _computes_loss(self) -> bool:
        """Whether this worker needs batches on its device; others need to know their shapes."""
        return self.flow.is_first or self.flow.is_last

    def _agree(self, counted: int) -> tuple[int, int]:
        """The count over all pipelines, and a random number that all workers of this one have.

        A task may draw random numbers before it calls the model (masks, mixtures of samples): the worker that computes
        the inputs and the one that computes the loss must draw the same ones.
        """
        values = [float(counted)] + [0.0] * self.copies
        if self.flow.is_first:
            values[1 + self.data_rank] = float(torch.randint(2**31, ()))
        total, *seeds = self.group.sum(*values)
        return int(total), int(seeds[self.data_rank])

    def _inputs(self, batch: Any, seed: int) -> Inputs:
        with isolated_rng(seed, self.device):
            return ask_for_inputs(lambda model: self.objective.loss(model, batch), self.model, "task.loss")

    def _check(self, losses: StepLosses, counted: int) -> None:
        """Raise what is wrong with the task's loss: in the first step on every worker, for nobody else has seen it."""
        if self.knows_kind:
            if losses.error is not None:
                raise losses.error
            return
        message = str(losses.error) if losses.error is not None else None
        if message is None and self.flow.is_last and self.objective.count is not None:
            try:
                self.check_count(counted, losses.total)
            except UserError as error:
                message = str(error)
        told = self.group.gather([message, self.returns_sums])
        if found := next((words for words, _ in told if words is not None), None):
            raise UserError(found)
        self.returns_sums, self.knows_kind = any(sums for _, sums in told), True

    def _rescale(self, step: StepBatch, count: Count) -> None:
        """Where the task sums over something else than samples, and tells how many only now."""
        if self.objective.count is None and self.returns_sums:
            (total,) = self.group.sum(float(count))
            if total == 0 or any(parameter.grad is not None for parameter in self.parameters):
                self.rescale_gradients(step.num_samples, int(total))

    def _sum_gradients(self) -> None:
        """Over the stages that share a weight, and over the pipelines."""
        for shared in self.summed:
            is_sum = [True] * len(shared.parameters)
            average_gradients(shared.parameters, is_sum, shared.group, self.bucket_bytes, self.device)

    def optimizer_step(self, lr: float) -> None:
        """Clip, update the weights, and clear the gradients."""
        if self.scaler is not None:  # which must have begun, and may not have seen a loss here
            self.scaler.scale(torch.zeros((), device=self.device))
        super().optimizer_step(lr)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to `max_norm`; returns what the norm of the whole model's was."""
        return clip_gradients(
            self.parameters, max_norm, lambda parameter: self.copies * len(self.holders[self.names[parameter]])
        )

    def evaluate(self, batch: MicroBatch) -> Measured:
        """The task's metrics on one batch, with the statistics of the first pipeline, on each one's last worker."""
        if self.buffers_differ:
            self.share_buffers()
            self.buffers_differ = False
        if not batch.num_samples:
            return {}
        data = self.to_device(batch.data) if self._computes_loss else batch.data

        def measure(model: Any) -> Measured:
            with self.autocast, isolated_rng(0, self.device):
                return self.objective.metrics(model, data, batch.num_samples)

        with torch.no_grad():
            output = self.flow.forward(ask_for_inputs(measure, self.model, "task.metrics"))
            if not self.flow.is_last:
                return {}
            measured: Measured = answer(measure, self.model, "task.metrics", output, again=True)
            return measured

    def share_buffers(self, names: Collection[str] | None = None) -> None:
        """Those of the first pipeline become everybody's: all, or some."""
        if self.copies > 1:
            for name, buffer in self.model.named_buffers():
                if name in self.own and buffer.numel() and (names is None or name in names):
                    dist.broadcast(buffer, group=self.copies_mesh.get_group(), group_src=0)

    def state(self) -> UnitState:
        """What is on this worker, as all strategies name it; of weights that several stages have, the first's alone."""
        learned = set(self.names.values())
        tensors: dict[str, Held] = {}
        for name, tensor in named_weights(self.model).items():
            if self._tells_of(name):
                if name in learned or self.copies == 1:
                    tensors[f"model.{name}"] = self._held(tensor)
                elif self.data_rank == 0:  # statistics, which differ: those of the first pipeline count
                    tensors[f"model.{name}"] = FlatPart(tensor.reshape(-1), 0, tuple(tensor.shape))
        for name, tensor in optimizer_tensors(self.optimizer, self.names).items():
            if self._tells_of(name.rpartition(".")[0]):
                tensors[f"optim.{name}"] = self._held(tensor)
        return UnitState(tensors, {"scaler": self.scaler.state_dict() if self.scaler else None})

    def _tells_of(self, name: str) -> bool:
        return self.holders[name][0] == self.worker

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        """As one that the workers of this place, one in each pipeline, hold and nobody else."""
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(tensor.detach(), self.copies_mesh, [Replicate()], run_check=False)

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight as a whole, in the order of their names: on rank 0; elsewhere, one that is not held is empty."""
        for name, tensor in sorted(named_weights(self.model).items()):
            holder, found = self.holders[name][0], tensor
            if self.data_rank == 0 and holder != 0:
                if self.worker == holder:
                    self.flow.send(tensor, 0)
                elif self.worker == 0:
                    found = self.flow.receive((tuple(tensor.shape), tensor.dtype), holder)
            yield name, torch.empty(0) if found.is_meta else found
