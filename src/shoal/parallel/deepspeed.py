"""DeepSpeed's ZeRO: optimizer state, gradients and weights are divided among the workers, by stage."""

import contextlib
import math
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.errors import DivergedError, UserError
from shoal.core.objective import Count, LossResult, Measured, Objective, check_loss
from shoal.core.parts import FlatPart, Held, read_flat, shape_of
from shoal.core.process import Process
from shoal.core.weights import named_weights
from shoal.parallel.deepspeed_config import Decided, build_config
from shoal.parallel.deepspeed_engine import (
    build_engine,
    check_device,
    choose_nvme_folder,
    take_weights_of_first,
)
from shoal.parallel.deepspeed_gradients import GradientWatch
from shoal.parallel.deepspeed_ops import check_nvme
from shoal.parallel.deepspeed_parts import Parts, Tensors, read_once, whole_weight
from shoal.parallel.replica import Replica
from shoal.parallel.section import ParallelSection
from shoal.parallel.unit import StepLoss, StepSettings, UnitState


class DeepSpeedUnit(Replica):
    """A DeepSpeed engine around the task's whole loss.

    Around the loss rather than the model, as in data parallel: a task may then call the model as often as it likes, and
    use its methods and attributes. Accumulation, the learning rate and the loss scale are Shoal's own, and so is the
    state that is saved; DeepSpeed divides, communicates, clips and steps.
    """

    whole_every = 1

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        settings: StepSettings,
        process: Process,
        section: ParallelSection,
    ) -> None:
        check_device(settings.precision, process.device)
        _check_weights(model, section)
        super().__init__(model, objective, settings, process, is_divided=True)
        decided = _decide(model, settings, process, section)
        config = build_config(decided)
        take_weights_of_first(model, process)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        # Frozen weights do not change, and DeepSpeed may keep them in low precision alone.
        self.frozen = {
            name: _share(tensor, process)
            for name, tensor in weights.items()
            if not model.get_parameter(name).requires_grad
        }
        self.shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self.root = _Root(self)
        precision = decided.low_precision
        self.engine, self.surroundings = build_engine(self.root, self.optimizer, config, precision, process)
        self.zero = self.engine.optimizer
        self.parts = Parts(self.zero, self.names)
        trained = {parameter: self.names[parameter] for parameter in self.parameters}
        trained = {parameter: name for parameter, name in trained.items() if math.prod(self.shapes[name])}
        self.watch = GradientWatch(self.engine, trained, process.group)
        if precision is not None:  # DeepSpeed's weights in full precision are rounded ones so far
            with self.surroundings.working():
                self.parts.load_weights(weights, "")
        self.compute_precision, self.autocast = self.autocast, contextlib.nullcontext()
        self.scale = None if self.scaler is None else self.scaler.state_dict()
        """The loss scale as GradScaler keeps it, for fp16."""
        self.scaler = None
        if decided.nvme_dir is not None:
            weakref.finalize(self, shutil.rmtree, decided.nvme_dir, ignore_errors=True)

    def forward_backward(self, step: StepBatch) -> StepLoss:
        """Gradients of the mean loss over the items of the whole step, on every worker those of its part."""
        with self.surroundings.working():
            self.zero.override_loss_scale(self.loss_scale)
            return self.accumulate_over_workers(step, self._loss_in_engine, self._before_last)

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by, and gradients divided by before they are used."""
        return 1.0 if self.scale is None else float(self.scale["scale"])

    def _loss_in_engine(self, batch: Any) -> LossResult:
        loss, count = self.root.run(self.engine, partial(self._loss_and_count, batch))
        return loss if count is None else (loss, count)

    def _loss_and_count(self, batch: Any) -> tuple[torch.Tensor, Count | None]:
        with self.compute_precision:
            loss = self.loss_of(batch)
        check_loss(loss, trains=True)
        return loss if isinstance(loss, tuple) else (loss, None)

    @contextlib.contextmanager
    def _before_last(self) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(False)
        yield
        self.engine.set_gradient_accumulation_boundary(True)

    def _backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def rescale_gradients(self, expected: int, count: Count) -> None:
        """By the loss scale, which gradients are divided by: they are out of reach, perhaps on a disk."""
        if int(count) == 0:
            raise UserError("task.loss counted nothing to learn from in a whole step; check the data")
        self.zero.override_loss_scale(self.loss_scale * int(count) / expected)

    def optimizer_step(self, lr: float) -> None:
        """Clip, update the weights, and clear the gradients."""
        for group in self.zero.param_groups:
            group["lr"] = lr
        with self.surroundings.working():
            self.engine.step()
        if self.settings.clip_norm is not None:
            self.grad_norm = torch.as_tensor(self.engine.get_global_grad_norm())
        if self.scale is not None:
            self.scale = next_scale(self.scale, bool(self.zero.overflow))
        elif self.zero.overflow:  # which DeepSpeed leaves out in silence, and others do not
            raise DivergedError(
                f"gradients became infinite or nan: lower optim.lr (now {lr:g}), raise optim.warmup_steps "
                "or set train.clip_norm=1.0"
            )

    def evaluate(self, batch: MicroBatch) -> Measured:
        """The task's metrics on one batch, with the statistics of rank 0, which are the ones that are saved."""
        measure = super().evaluate
        with self.surroundings.working(), self.compute_precision:
            measured: Measured = self.root.run(self.root, lambda: (None, measure(batch)))[1]
        return measured

    def report(self) -> dict[str, float]:
        """Gradient norm where it is clipped, loss scale where there is one."""
        return super().report() | ({} if self.scale is None else {"loss_scale": self.loss_scale})

    def state(self) -> UnitState:
        """Weights as `model.NAME`, optimizer state as `optim.NAME.KEY`, the loss scaler among the values."""
        with self.surroundings.working():
            learned: dict[str, Held] = {**self.frozen, **self.parts.weights()}
            moments = self.parts.moments()
        weights = named_weights(self.model)
        learned |= {name: torch.empty(shape) for name, shape in self.shapes.items() if not math.prod(shape)}
        tensors: dict[str, Held] = {f"model.{name}": learned.get(name, tensor) for name, tensor in weights.items()}
        tensors |= {f"optim.{name}": held for name, held in moments.items()}
        statistics = frozenset(f"model.{name}" for name in weights.keys() - learned.keys())
        return UnitState(tensors, {"scaler": self.scale}, statistics)

    def load(self, state: UnitState) -> None:
        """Take over a state; names must be the model's own."""
        tensors = cast("Mapping[str, torch.Tensor]", state.tensors)
        weights = named_weights(self.model)
        self._check_names(tensors, weights)
        with self.surroundings.working():
            self._load_frozen(tensors, "model.")
            self.parts.load(tensors, "model.", "optim.")
        for name in weights.keys() - self.shapes.keys():
            weights[name].copy_(tensors[f"model.{name}"])
        if self.scale is not None and state.values.get("scaler"):
            self.scale = dict(state.values["scaler"])

    def take_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over some weights; the others stay. A worker that cannot read them does not keep others waiting."""
        own = named_weights(self.model)
        unknown = sorted(set(weights) - own.keys())
        assert not unknown, unknown
        with self.surroundings.working():
            try:
                self._load_frozen(weights, "")
            finally:
                self.parts.load_weights(weights, "")
        for name in own.keys() & set(weights) - self.shapes.keys():
            own[name].copy_(weights[name])

    def _check_names(self, tensors: Tensors, weights: Mapping[str, torch.Tensor]) -> None:
        given = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
        if weights.keys() != given:
            wrong = ", ".join(sorted(weights.keys() ^ given)[:5])
            raise UserError(f"model: the checkpoint is of another model (differs in {wrong}); use its own recipe")
        for name in given:
            shape, own = shape_of(tensors, f"model.{name}"), self.shapes.get(name, tuple(weights[name].shape))
            if shape != own:
                shapes = f"{shape} in the checkpoint and {own} in this model"
                raise UserError(f"model: {name} is {shapes}; use the checkpoint's own recipe")

    @torch.no_grad()
    def _load_frozen(self, tensors: Tensors, prefix: str) -> None:
        """As far as they are given."""
        given = set(tensors)
        for name, part in self.frozen.items():
            if (key := prefix + name) not in given:
                continue
            whole = read_once(tensors, key)
            part.flat.copy_(read_flat(whole, key, part.start, part.flat.numel()))
            parameter: Any = self.model.get_parameter(name)
            if hasattr(parameter, "ds_tensor"):
                # DeepSpeed's own parts are as long on every worker; what of one is beyond the weight's end, it ignores.
                held = parameter.ds_tensor
                start = min(self.data_rank * held.ds_numel, parameter.ds_numel)
                count = min(held.ds_numel, parameter.ds_numel - start)
                held.data.narrow(0, 0, count).copy_(read_flat(whole, key, start, count))
            else:
                parameter.data.copy_(whole[key])

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight as a whole, in the order of their names."""
        with self.surroundings.working():
            learned = self.frozen | self.parts.weights()
        for name, tensor in sorted(named_weights(self.model).items()):
            yield name, whole_weight(learned[name]) if name in learned else tensor


class _Root(nn.Module):
    """What the engine sees: its forward pass is whatever is to be computed with the model."""

    def __init__(self, unit: Replica) -> None:
        super().__init__()
        self.model = unit.model
        self.todo: Callable[[], tuple[torch.Tensor | None, Any]] | None = None
        self.besides: Any = None

    def run(self, called: Callable[[], Any], todo: Callable[[], tuple[torch.Tensor | None, Any]]) -> tuple[Any, Any]:
        """What `todo` gives, computed in a call of the engine or of this: a tensor to differentiate, and what else."""
        self.todo = todo
        try:
            return called(), self.besides
        finally:
            self.todo = self.besides = None

    def forward(self) -> torch.Tensor | None:
        """The tensor alone: DeepSpeed looks into everything that goes in and comes out."""
        assert self.todo is not None
        tensor, self.besides = self.todo()
        return tensor


def next_scale(scale: dict[str, Any], has_overflown: bool) -> dict[str, Any]:
    """The loss scale after a step, by the rule of PyTorch's GradScaler and in its words."""
    if has_overflown:
        return scale | {"scale": scale["scale"] * scale["backoff_factor"], "_growth_tracker": 0}
    good = scale["_growth_tracker"] + 1
    if good == scale["growth_interval"]:
        return scale | {"scale": scale["scale"] * scale["growth_factor"], "_growth_tracker": 0}
    return scale | {"_growth_tracker": good}


def _check_weights(model: nn.Module, section: ParallelSection) -> None:
    """Refuse what could not be trained, or not be restored."""
    for name, parameter in model.named_parameters():
        if section.deepspeed.offload_params == "nvme" and not parameter.requires_grad:
            raise UserError(
                f"parallel.deepspeed.offload_params: nvme is for weights that train, and {name} does not; use cpu"
            )
        if parameter.dtype != torch.float32 and parameter.requires_grad:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UserError(f"model: {name} is {kind}; deepspeed trains weights in float32, so call model.float()")


def _share(tensor: torch.Tensor, process: Process) -> FlatPart:
    """An equal share of a tensor, copied."""
    length = -(-tensor.numel() // process.world_size)
    flat = tensor.reshape(-1)[process.rank * length : (process.rank + 1) * length].clone()
    return FlatPart(flat, min(process.rank * length, tensor.numel()), tuple(tensor.shape))


def _decide(model: nn.Module, settings: StepSettings, process: Process, section: ParallelSection) -> Decided:
    """What DeepSpeed's configuration follows from; to offload to nvme, with a folder of this worker's own there."""
    chosen, nvme_dir = section.deepspeed, None
    if "nvme" in (chosen.offload_optimizer, chosen.offload_params):
        assert chosen.nvme_dir is not None
        folder = Path(chosen.nvme_dir).expanduser().absolute()
        check_nvme(folder, process)
        nvme_dir = str(choose_nvme_folder(folder, process.rank))
    sizes = [parameter.numel() for parameter in model.parameters()]
    return Decided(
        section=chosen,
        optim=settings.optim,
        precision=settings.precision,
        clip_norm=settings.clip_norm,
        global_batch=settings.global_batch,
        micro_batch=settings.micro_batch,
        workers=process.world_size,
        num_elements=sum(sizes),
        largest=max(sizes),
        nvme_dir=nvme_dir,
    )
