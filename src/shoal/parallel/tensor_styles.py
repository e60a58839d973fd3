"""The words of a model's plan as PyTorch's parallel styles: its own where they do, and what they leave open."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from shoal.core.errors import UserError
from shoal.core.parts import local_place
from shoal.parallel.draws import draw_apart
from shoal.parallel.tensor_plan import Plan
from shoal.parallel.ties import tie_again, tied_names

_TOKENS = Shard(1)


def divide_layers(model: nn.Module, plan: Plan, mesh: DeviceMesh, sequence: bool) -> None:
    """Leave on this worker its part of every layer that the plan names, with tied weights still tied.

    Every worker must have the same weights, or the model be on the meta device: nothing is sent. With `sequence`, the
    gradients of `plan.of_tokens` are to be summed over `mesh`.
    """
    assert not sequence or plan.can_divide_tokens
    ties = tied_names(model)
    for name, word in plan.words.items():
        module = model.get_submodule(name)
        if (style := _style(word, name, sequence)) is not None:
            parallelize_module(module, mesh, style, src_data_rank=None)
        if word == "heads" or (sequence and word in ("tokens", "join")):
            draw_apart(module, mesh.get_local_rank())
    tie_again(model, ties)


def _style(word: str, name: str, sequence: bool) -> ParallelStyle | None:
    """What PyTorch calls it; None where there is nothing to do."""
    between = _TOKENS if sequence else Replicate()
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "vocabulary": _Vocabulary,
        "gather": lambda: _First(between),
        "columns": lambda: _Columns(name),
        "rows": lambda: RowwiseParallel(output_layouts=between),
        "logits": lambda: _Logits(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        styles |= {"split": lambda: _Output(Replicate(), _TOKENS), "join": lambda: _Output(_TOKENS, Replicate())}
    return styles[word]() if word in styles else None


class _Vocabulary(ParallelStyle):
    """Each worker looks up the tokens that it has rows for. (With PyTorch's own style, each has a gradient of all.)"""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        rows = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        (first, *_), (count, *_) = local_place(rows)
        module.weight = nn.Parameter(rows, requires_grad=module.weight.requires_grad)
        module.forward = partial(_look_up, module, device_mesh, first, first + count)  # type: ignore[method-assign]
        return module


def _look_up(module: nn.Embedding, mesh: DeviceMesh, first: int, end: int, tokens: torch.Tensor) -> torch.Tensor:
    weight, padding = module.weight, module.padding_idx
    assert isinstance(weight, DTensor)
    # A token that is in no worker's rows stays with the first or the last, and is the error there that it always is.
    is_elsewhere = (tokens >= 0) & (tokens < first)
    if end < module.num_embeddings:
        is_elsewhere |= tokens >= end
    own_padding = padding - first if padding is not None and first <= padding < end else None
    own = F.embedding((tokens - first).masked_fill(is_elsewhere, 0), weight.to_local(), own_padding)
    own = own.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
    return DTensor.from_local(own, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


class _First(ParallelStyle):
    """The first input is made whole. (PyTorch's own style wants to know how many inputs there are.)"""

    def __init__(self, given: Placement) -> None:
        super().__init__()
        self.given = given

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_make_whole, device_mesh, self.given))
        return module


def _make_whole(mesh: DeviceMesh, given: Placement, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # A DTensor to the layers inside: so they add up what each of them has of its gradient before it is sent.
    own = DTensor.from_local(_as_computed(inputs[0]), mesh, [given], run_check=False)
    return own.redistribute(placements=[Replicate()]), *inputs[1:]


def _as_computed(tensor: torch.Tensor) -> torch.Tensor:
    """In the numbers that a linear layer will take it in, before it is sent: they may be half as long."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


class _Columns(ColwiseParallel):
    """PyTorch's, which would take the part of the tokens that it is given without `gather` for all of them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_check_gathered, self.name))
        return super()._apply(module, device_mesh)


def _check_gathered(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if not isinstance(inputs[0], DTensor):
        raise UserError(
            f"model.name: shoal_tensor says 'columns' of {name!r}, and what that is given has not been made whole; "
            "say 'gather' of the module around it"
        )


class _Logits(ColwiseParallel):
    """PyTorch's, which hands out a view, that a task could not change in place."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _module, inputs: (_as_computed(inputs[0]), *inputs[1:]))
        super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _module, _inputs, output: torch.ops.aten._unsafe_view(output, output.shape))
        return module


class _Output(ParallelStyle):
    """The output is divided by tokens, or made whole."""

    def __init__(self, given: Placement, wanted: Placement) -> None:
        super().__init__()
        self.given = given
        self.wanted = wanted

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_redistribute, device_mesh, self.given, self.wanted))
        return module


def _redistribute(
    mesh: DeviceMesh, given: Placement, wanted: Placement, module: nn.Module, inputs: Any, output: torch.Tensor
) -> torch.Tensor:
    if wanted == _TOKENS and output.shape[1] % mesh.size():
        raise UserError(
            f"parallel.tensor.sequence: {mesh.size()} workers cannot have equal shares of a batch of "
            f"{output.shape[1]} tokens; turn it off, or give batches of a length that they divide"
        )
    return DTensor.from_local(output, mesh, [given], run_check=False).redistribute(placements=[wanted]).to_local()
