"""The sizes of a recipe's model and of one micro-batch through it, found without the memory that they need."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward

from shoal.core.errors import NoDataError, UserError
from shoal.core.objective import check_loss
from shoal.core.rng import isolated_rng
from shoal.models.blocks import repeated_blocks
from shoal.parallel.memory_fsdp import gathered_as
from shoal.parallel.numerics import autocast, recompute_activations
from shoal.parallel.sizes import LOSS, Phase, Piece, Profile, Way
from shoal.parallel.stages import row_of
from shoal.parallel.tensor_plan import read_plan
from shoal.parallel.ties import tied_names
from shoal.recipe.schema import Recipe
from shoal.tasks.build import build_task, task_objective
from shoal.train.advise import TooFewSamplesError
from shoal.train.build import datasets_of, model_of
from shoal.train.kernels import AsOnGpu, workspace_on_cpu, workspace_on_gpu
from shoal.train.live import LiveBytes
from shoal.train.pieces import Blocks, Watch, has_own_blocks, num_bytes, pieces_of, pipeline_ends, tensors_in
from shoal.train.shapes import Shapes, known_shapes, shapes_of
from shoal.train.share_layers import Traffic, share_layers

_CPU = torch.device("cpu")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ONE_VALUE = "Expected more than 1 value per channel"
"""What batch norm says."""
_FEW = (2, 4)
"""Samples that a model is run with where it cannot be traced without running it."""


@dataclass(frozen=True)
class Form:
    """What a strategy makes of a model before a step runs through it."""

    tensor: int = 1
    """Workers that share every layer."""
    sequence: bool = False
    dtype: str | None = None
    """What weights are computed with, where that is not what they are kept in."""
    untied: bool = False
    """Whether tied weights are several, each with a gradient of its own."""
    recompute: bool = False


def form_of(way: Way, recompute: bool) -> Form:
    """The form of a model under a strategy."""
    section, dtype = way.parallel, None
    is_sharded = way.strategy == "fsdp" or (way.strategy == "tensor" and section.tensor.across == "fsdp")
    if is_sharded:
        dtype = gathered_as(section.fsdp, way.precision)
    elif way.strategy == "deepspeed":
        dtype = way.precision
    dtype = dtype if dtype in _DTYPES else None
    return Form(way.degrees.tensor, section.tensor.sequence, dtype, way.strategy == "pipeline", recompute)


class Tracer:
    """A recipe's model without its weights, and what a micro-batch of any size through it needs.

    Tensors are PyTorch's fake ones, which have a shape and no memory. A model that looks at the numbers in its tensors
    cannot be run with them: then it is built and run with a few samples, and more are extrapolated from that.
    """

    def __init__(self, recipe: Recipe, on_gpu: bool) -> None:
        self.recipe = recipe
        self.on_gpu = on_gpu
        self.task = build_task(recipe.task)
        self.objective = task_objective(self.task)
        self.shapes = self._shapes()
        self.is_fake = True
        self._mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
        self._models: dict[Form, nn.Module] = {}
        self._pieces: dict[Form, tuple[tuple[Piece, ...], tuple[Piece, Piece] | None]] = {}
        self._blocks: dict[Form, Blocks] = {}
        self._traffic: dict[Form, Traffic] = {}
        self._profiles: dict[tuple[int, Form], Profile] = {}

    def _shapes(self) -> Shapes:
        shapes = None if hasattr(self.task, "datasets") else known_shapes(self.recipe.data)
        try:
            return shapes or shapes_of(datasets_of(self.task, self.recipe), self.recipe.data, self.recipe.train.seed)
        except FileNotFoundError as error:  # of datasets of the user's own
            raise NoDataError(f"data: {error}") from error

    def profile(self, micro_batch: int, form: Form | None = None) -> Profile:
        """What a micro-batch of so many samples needs, on one worker."""
        form = form or Form(recompute=self.recipe.train.activation_checkpointing)
        key = (micro_batch, form)
        if key not in self._profiles:
            self._profiles[key] = self._trace(micro_batch, form)
        return self._profiles[key]

    def num_parameters(self) -> int:
        """Of the whole model, tied ones once."""
        form = next((form for form in self._pieces if form.tensor == 1), Form())
        if form not in self._pieces:
            with isolated_rng(self.recipe.train.seed), self._mode:
                self._model(form)
        return sum(piece.parameters for piece in self._pieces[form][0])

    def run_for_real(self) -> None:
        """From here on with memory, on the CPU."""
        self.is_fake, self._mode, self._models = False, contextlib.nullcontext(), {}

    def _trace(self, micro_batch: int, form: Form) -> Profile:
        if self.is_fake:
            try:
                return self._run(micro_batch, form)
            except UserError:
                raise
            except Exception:  # noqa: BLE001 - whatever its code does that fake tensors cannot; else it is raised again
                self.run_for_real()
        if micro_batch <= _FEW[-1]:
            return self._run(micro_batch, form)
        few, more = (self.profile(count, form) for count in _FEW)
        return extrapolate(few, more, micro_batch)

    def _model(self, form: Form) -> nn.Module:
        if form not in self._models:
            model = model_of(self.task, self.recipe, self.shapes.spec)
            if form.tensor > 1:
                plan = read_plan(model, form.tensor, self.recipe.cluster.workers)
                self._traffic[form] = share_layers(model, plan, form.sequence and plan.can_divide_tokens)
            # Stages are cut between all blocks of a row; elsewhere those with weights count. A user error if none are.
            blocks = row_of(model).blocks if form.untied else repeated_blocks(model)
            self._blocks[form] = blocks
            self._pieces[form] = pieces_of(model, blocks), pipeline_ends(model)
            if form.untied:
                _untie(model)
            if form.recompute:
                recompute_activations(model)
            self._models[form] = model
        return self._models[form]

    def _run(self, micro_batch: int, form: Form) -> Profile:
        """A forward and a backward pass, as `parallel.replica.Replica` makes them."""
        with isolated_rng(self.recipe.train.seed), self._mode, contextlib.ExitStack() as stack:
            model = self._model(form)
            pieces, ends = self._pieces[form]
            if form.dtype is not None:
                stack.enter_context(_computing_in(model, _DTYPES[form.dtype]))
            batch = self.shapes.make(micro_batch)
            given = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
            live = LiveBytes(given, workspace_on_gpu if self.on_gpu else workspace_on_cpu)
            watch = stack.enter_context(contextlib.closing(Watch(model, self._blocks[form], live)))
            traffic = self._traffic.setdefault(form, Traffic(1))
            traffic.sent = 0
            as_on = AsOnGpu() if self.on_gpu and self.is_fake else contextlib.nullcontext()
            try:
                with live, as_on:  # in the backward pass too, where activations may be computed again
                    with autocast(self.recipe.train.precision, _CPU):
                        loss = self.objective.loss(model, batch)
                    check_loss(loss, trains=True)
                    live.enter(LOSS, is_backward=True)
                    _backward(loss[0] if isinstance(loss, tuple) else loss)
                    live.finish()
            except ValueError as error:
                if _ONE_VALUE in str(error):
                    raise TooFewSamplesError(
                        f"train.micro_batch: batch norm cannot train on {micro_batch} sample at a time; have more of "
                        "them, by train.global_batch or fewer workers"
                    ) from error
                raise
            finally:
                for parameter in model.parameters():
                    parameter.grad = None
        return Profile(
            micro_batch,
            pieces,
            tuple(live.phases),
            batch=num_bytes(tensors_in(batch)),
            between=watch.between,
            has_own_blocks=has_own_blocks(model),
            ends=ends,
            sent=traffic.sent,
        )


def _backward(loss: torch.Tensor) -> None:
    """As `loss.backward()`, which a mode would see as one function and be blind to what is inside."""
    ones = (torch.ones_like(loss),)
    _engine_run_backward((loss,), ones, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _untie(model: nn.Module) -> None:
    """Make tied weights several, as they are where stages of a pipeline have them."""
    for _, *others in tied_names(model):
        for name in others:
            owner, _, own = name.rpartition(".")
            parameter = model.get_parameter(name)
            untied = nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(owner), own, untied)


@contextlib.contextmanager
def _computing_in(model: nn.Module, dtype: torch.dtype) -> Any:
    """Weights in low precision, and what comes into the model or a block too, as FSDP2 has it."""

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return torch.utils._pytree.tree_map(_cast_to(dtype), (args, kwargs))

    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    in_full = {parameter for norm in norms for parameter in norm.parameters()}
    kept = {parameter: parameter.data for parameter in model.parameters() if parameter not in in_full}
    hooks = [
        module.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)
        for module in (model, *(block for _, block in repeated_blocks(model)))
    ]
    for parameter, data in kept.items():
        parameter.data = data.to(dtype)
    try:
        yield
    finally:
        for parameter, data in kept.items():
            parameter.data = data
        for hook in hooks:
            hook.remove()


def _cast_to(dtype: torch.dtype) -> Any:
    return lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def extrapolate(few: Profile, more: Profile, micro_batch: int) -> Profile:
    """What a larger micro-batch would need, from two smaller ones."""
    factor = (micro_batch - few.micro_batch) / (more.micro_batch - few.micro_batch)

    def line(small: int, large: int) -> int:
        return max(0, round(small + factor * (large - small)))

    phases = tuple(
        Phase(
            small.piece,
            small.is_backward,
            line(small.peak, large.peak),
            small.peak_gradients,
            line(small.peak_apart, large.peak_apart),
            line(small.kept, large.kept),
            small.gradients,
        )
        for small, large in zip(few.phases, more.phases, strict=True)
    )
    batch, between = line(few.batch, more.batch), line(few.between, more.between)
    sent = line(few.sent, more.sent)
    return replace(few, micro_batch=micro_batch, phases=phases, batch=batch, between=between, sent=sent)
