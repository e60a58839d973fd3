"""A model on one device with its optimizer, whole or this worker's part of every tensor: what `single` is, and what
every worker holds of a model whose micro-batches run one after the other."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.errors import UserError
from shoal.core.kernels import can_compile_kernels
from shoal.core.move import channels_last, move
from shoal.core.objective import Count, LossResult, Measured, Objective, check_loss
from shoal.core.parts import copy_own_part, is_distributed, shape_of
from shoal.core.process import Process
from shoal.core.weights import named_weights, take_weights
from shoal.models.linear_cross_entropy import SumsLoss
from shoal.parallel.clip import SharedScaler, clip_gradients, local_gradient, num_holders
from shoal.parallel.compiling import compiled, compiled_loss
from shoal.parallel.numerics import autocast, build_scaler, check_precision, recompute_activations
from shoal.parallel.optimizer import (
    add_missing_momentum,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    set_lr,
)
from shoal.parallel.unit import Lap, StepLoss, StepSettings, UnitState, untimed


class Replica:
    """Micro-batches run one after the other and their gradients add up."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        settings: StepSettings,
        process: Process,
        *,
        is_divided: bool = False,
    ) -> None:
        """A model that `is_divided` among the workers is in its place already."""
        check_precision(settings.precision, process.device)
        self.model = model if is_divided else model.to(process.device)
        own_memory(self.model)
        self.is_channels_last = settings.channels_last and not is_divided
        if self.is_channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if isinstance(self.model, SumsLoss):
            self.model.sums_loss = process.device.type == "cuda" and not is_divided and can_compile_kernels()
        if settings.fp8:
            on_gpu = process.device.type == "cuda"
            if on_gpu and (is_divided or settings.precision != "bf16" or not settings.compile):
                raise UserError(
                    "train.fp8: needs train.precision bf16, torch.compile, and strategy single or ddp; leave it out"
                )
            from shoal.parallel.fp8 import use_fp8

            use_fp8(self.model, process.device)
        self.is_divided = is_divided
        self.lap: Lap = untimed
        self.objective = objective
        self.settings = settings
        self.device = process.device
        self.data_rank = self.random_rank = process.rank
        self.data_size = process.world_size
        self.world_size = process.world_size
        self.group = process.group
        self.tell = process.tell
        if settings.activation_checkpointing:
            recompute_activations(self.model)
        self.forward = compiled(self.model, by_block=is_divided) if settings.compile else self.model
        self.loss_of: Callable[[Any], LossResult] = lambda batch: objective.loss(self.forward, batch)
        """The task's loss on a batch that is on the device."""
        if settings.compile and objective.is_traceable and not is_divided:
            self.loss_of = compiled_loss(objective, self.model, settings.micro_batch)
        self.optimizer = build_optimizer(self.model, settings.optim)
        if is_divided and settings.optim.name == "sgd":
            for group in self.optimizer.param_groups:
                group["fused"] = None  # PyTorch has that kernel for whole tensors alone
        self.scaler = build_scaler(
            settings.precision, self.device, SharedScaler if is_divided else torch.amp.GradScaler
        )
        self.autocast = autocast(settings.precision, self.device)
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.buffers_differ = False
        """Whether each worker has statistics of its own, since the last step."""
        self.learned_buffers: list[str] | None = None
        """Buffers that steps change and nobody else shares; known after the first one."""
        self.adding_up: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Around the micro-batches of a step: at its end, their gradients are there."""
        self.grad_norm: torch.Tensor | None = None
        self.count_is_checked = False
        self.returns_sums = False
        """Whether the task's loss is (sum, count) rather than a mean; known after the first forward pass."""

    def count(self, step: StepBatch) -> int:
        """Items of this worker's share, counted on the host, where the batches still are: no device is waited for."""
        count_items = self.objective.count
        assert count_items is not None
        return sum(
            micro.count if micro.count is not None else int(count_items(micro.data))
            for micro in step.microbatches
            if micro.num_samples
        )

    def accumulate_over_workers(
        self,
        step: StepBatch,
        loss_of: Callable[[Any], LossResult],
        before_last: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> StepLoss:
        """Gradients of the mean loss over the items of the whole step, where the workers' gradients are averaged."""
        with self.buffers_alike():
            return self._accumulate_over_workers(step, loss_of, before_last)

    def _accumulate_over_workers(
        self,
        step: StepBatch,
        loss_of: Callable[[Any], LossResult],
        before_last: Callable[[], AbstractContextManager[Any]],
    ) -> StepLoss:
        weight, repeats = self.data_size, self.world_size // self.data_size
        if self.objective.count is None:
            loss = self.accumulate(step, loss_of, lambda: step.num_samples, weight, before_last)
            if self.returns_sums:
                (total,) = self.group.sum(float(loss.count))
                self.rescale_gradients(step.num_samples, int(total) // repeats)
            return loss
        counted = self.count(step)
        wait_for_total = self.group.start_sum(counted)
        expected: list[float] = []

        def total_count() -> float:
            if not expected:
                expected.append(wait_for_total()[0] / repeats)
                if expected[0] == 0:
                    raise UserError(
                        "task.count found nothing to learn from in a whole step; check the data and train.global_batch"
                    )
            return expected[0]

        loss = self.accumulate(step, loss_of, total_count, weight, before_last)
        self.check_count(counted, loss.count)
        return loss

    def accumulate(
        self,
        step: StepBatch,
        loss_of: Callable[[Any], LossResult],
        expected: Callable[[], float],
        weight: int = 1,
        before_last: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> StepLoss:
        """Add up the gradients of `weight` times the loss per expected item.

        `expected` is asked after the first forward pass, so that counting over workers overlaps with it; every
        micro-batch but the last runs inside `before_last()`.
        """
        terms: list[tuple[torch.Tensor, int]] = []
        total: Count = 0
        last = len(step.microbatches) - 1
        with self.adding_up():
            for number, micro in enumerate(step.microbatches):
                with before_last() if number < last else contextlib.nullcontext():
                    batch = self.to_device(micro.data)
                    self.lap("h2d")
                    with self.autocast:
                        loss = loss_of(batch)
                    check_loss(loss, trains=True)
                    self.returns_sums = isinstance(loss, tuple)
                    share, term, count = self.share(loss, micro.num_samples, expected(), weight)
                    if term is not None:
                        terms.append(term)
                    total = total + count
                    self.lap("forward")
                    self._backward(share)
                    self.lap("backward")
        return StepLoss(terms, total)

    def share(
        self, loss: LossResult, num_samples: int, expected: float, weight: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, int] | None, Count]:
        """What of a micro-batch goes into the gradient, into the reported loss, and into the count."""
        if num_samples == 0:  # stand-in samples of a short step: the backward pass must run, and must add nothing
            return (loss[0] if isinstance(loss, tuple) else loss) * 0.0, None, 0
        if isinstance(loss, tuple):
            loss_sum, count = loss
            share = loss_sum * (weight / expected) if weight > 1 else divided(loss_sum, expected)
            return share, (loss_sum.detach(), 1), count
        if self.objective.count is not None:
            raise UserError("task.loss returned a mean, but the task has count(); return (sum, count) or drop count()")
        factor = num_samples * weight / expected
        return loss if factor == 1 else loss * factor, (loss.detach(), num_samples), num_samples

    def check_count(self, counted: int, total: Count) -> None:
        """Once, because comparing waits for the device: what the task counts before and after must be the same."""
        if not self.count_is_checked:
            self.count_is_checked = True
            if int(total) != counted:
                raise UserError(f"task.count says {counted} items and task.loss counts {int(total)}; they must agree")

    def _backward(self, loss: torch.Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def rescale_gradients(self, expected: int, count: Count) -> None:
        """A task that sums over something else than samples tells how many only after the forward pass."""
        if isinstance(count, int) and count == expected:
            return
        if int(count) == 0:  # which waits for the device, where the task counts there
            raise UserError("task.loss counted nothing to learn from in a whole step; check the data")
        # On the parts that are here: kernels take no mixture of divided and whole ones.
        gradients = [gradient for p in self.parameters if (gradient := local_gradient(p)) is not None]
        torch._foreach_mul_(gradients, expected / count)

    def optimizer_step(self, lr: float) -> None:
        """Clip, update the weights, and clear the gradients."""
        set_lr(self.optimizer, lr)
        self.update()
        self.optimizer.zero_grad(set_to_none=True)

    def update(self) -> None:
        """Clip, and update the weights by the gradients that are there."""
        optimizer = self.optimizer
        if self.settings.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            self.grad_norm = self.clip(self.settings.clip_norm)
        add_missing_momentum(optimizer)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to `max_norm`; returns what their norm was."""
        if self.is_divided:
            return clip_gradients(self.parameters, max_norm, lambda tensor: num_holders(tensor, self.world_size))
        return nn.utils.clip_grad_norm_(self.parameters, max_norm)

    def evaluate(self, batch: MicroBatch) -> Measured:
        """The task's metrics on one batch, with the statistics of rank 0, which are the ones that are saved."""
        if self.buffers_differ:
            self.share_buffers()
            self.buffers_differ = False
        with torch.no_grad(), self.autocast:
            return self.objective.metrics(self.forward, self.to_device(batch.data), batch.num_samples)

    def share_buffers(self, names: Collection[str] | None = None) -> None:
        """Those of the first worker become everybody's: all, or some."""
        if self.world_size > 1:
            # Looked up anew: a model may put another tensor in the place of one.
            found = self.model.named_buffers()
            share_tensors([buffer for name, buffer in found if buffer.numel() and (names is None or name in names)])

    @contextlib.contextmanager
    def buffers_alike(self) -> Iterator[None]:
        """Around a step: it begins with the statistics that would be saved, and leaves each worker with its own."""
        if self.learned_buffers:
            self.share_buffers(self.learned_buffers)
        before = [(name, buffer, buffer._version) for name, buffer in self.model.named_buffers()]
        yield
        self.buffers_differ = True
        if self.learned_buffers is None:
            now = dict(self.model.named_buffers())
            # Written to, or replaced. DDP itself shares those that it knows.
            changed = [
                name
                for name, old, version in before
                if now.get(name) is not old or (self.is_divided and old._version != version)
            ]
            self.learned_buffers = sorted(set().union(*self.group.gather(changed)))

    def report(self) -> dict[str, float]:
        """Gradient norm where it is clipped, loss scale where there is one."""
        values = {}
        if self.grad_norm is not None:
            values["grad_norm"] = float(self.grad_norm)
        if self.scaler is not None:
            values["loss_scale"] = float(self.scaler.get_scale())
        return values

    def state(self) -> UnitState:
        """Weights as `model.NAME`, optimizer state as `optim.NAME.KEY`, the loss scaler among the values."""
        weights = {f"model.{name}": tensor for name, tensor in named_weights(self.model).items()}
        moments = optimizer_tensors(self.optimizer, self.names)
        tensors = weights | {f"optim.{name}": tensor for name, tensor in moments.items()}
        learned = {f"model.{name}" for name, _ in self.model.named_parameters()}
        values = {"scaler": self.scaler.state_dict() if self.scaler else None}
        return UnitState(tensors, values, frozenset(weights.keys() - learned))

    def load(self, state: UnitState) -> None:
        """Take over a state; names must be the model's own."""
        weights = named_weights(self.model)
        given = {name.removeprefix("model.") for name in state.tensors if name.startswith("model.")}
        if weights.keys() != given:
            wrong = ", ".join(sorted(weights.keys() ^ given)[:5])
            raise UserError(f"model: the checkpoint is of another model (differs in {wrong}); use its own recipe")
        tensors = cast("Mapping[str, torch.Tensor]", state.tensors)
        for name in given:
            shape = shape_of(tensors, f"model.{name}")
            if tuple(weights[name].shape) != shape:
                shapes = f"{shape} in the checkpoint and {tuple(weights[name].shape)} in this model"
                raise UserError(f"model: {name} is {shapes}; use the checkpoint's own recipe")
            if not weights[name].is_meta:  # which another worker holds
                copy_own_part(weights[name], tensors, f"model.{name}")
        load_optimizer_tensors(self.optimizer, self.names, tensors, "optim.")
        if self.scaler is not None and state.values.get("scaler"):
            self.scaler.load_state_dict(state.values["scaler"])

    def take_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over some weights; the others stay."""
        take_weights(self.model, weights)

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight as a whole, in the order of their names."""
        for name, tensor in sorted(named_weights(self.model).items()):
            # On the device, where workers can talk: what is offloaded lies in the host's memory.
            yield name, cast("Any", tensor.to(self.device)).full_tensor() if is_distributed(tensor) else tensor

    def to_device(self, data: Any) -> Any:
        """A batch where it is computed on, laid out as it is computed with."""
        if self.device.type != "cpu":
            data = move(data, self.device)
        return channels_last(data) if self.is_channels_last else data


def divided(total: torch.Tensor, count: torch.Tensor | float) -> torch.Tensor:
    """`total / count`; to the bit the same whether the count is on the host or, for a recorded step, on the GPU."""
    if isinstance(count, torch.Tensor):  # a GPU divides by a number of the host's by multiplying with its inverse
        return total * count.reciprocal()
    return total / count


def share_tensors(tensors: list[torch.Tensor]) -> None:
    """The first worker's values for all, by one message for each type."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for alike in kinds.values():
        # As bytes: not every type can be sent, and memory may be laid out in any way.
        sent = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        dist.broadcast(sent.view(torch.uint8), 0)
        for tensor, values in zip(alike, torch.split(sent, [tensor.numel() for tensor in alike]), strict=True):
            tensor.detach().copy_(values.view(tensor.shape))


def own_memory(model: nn.Module) -> None:
    """For weights that are cut out of larger ones, and buffers that are one number seen many times.

    Fused optimizers walk memory from end to end; and what is seen many times cannot be written to by a resume.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        # A new tensor like it has the same strides only if these leave nothing out.
        is_whole = tensor.is_meta or is_distributed(tensor)
        if not is_whole and torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            tensor.data = tensor.data.contiguous()
