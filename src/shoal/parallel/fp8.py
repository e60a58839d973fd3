"""Linear layers whose products are computed in 8-bit floats, on GPUs that can.

Inputs and weights travel as e4m3, gradients as e5m2; products are added up in more, and come out as bfloat16. The
gradient of the weights, which adds up over all tokens, stays in bfloat16.

Every tensor is scaled into the range of its type as it comes, by the largest of its values: of weights all are looked
at, of the others every sixteenth row, with two bits to spare and what is larger still cut off. So there is no state to
keep, and little to read twice.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from shoal.core.errors import UserError
from shoal.core.float8 import pack, scale_for
from shoal.models.blocks import repeated_blocks
from shoal.models.linear_cross_entropy import SumsLoss
from shoal.models.transformer import FeedForward, HasStream

_INPUT, _GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_SAMPLED = 16
"""Of so many rows, one is looked at."""
_TO_SPARE = 4.0
"""How much larger a value may be than any that was looked at."""
_LEAST = (8, 9)
"""Compute capability: Ada; Hopper is 9.0."""
_MULTIPLE = 16
"""Of which both sides of a weight must be."""
_LARGE = 600
"""Product of a weight's sides over their sum, from which a faster product is worth more than packing its factors."""


def use_fp8(model: nn.Module, device: torch.device) -> None:
    """Have the large linear layers of a model's blocks, and its fused output projection, computed so from here on."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST:
        raise UserError("train.fp8: needs a GPU with 8-bit floats (NVIDIA Ada, Hopper or newer); leave it out")
    inside = [module for _, block in repeated_blocks(model) for module in block.modules()]
    pairs = [module for module in inside if type(module) is FeedForward and _is_large(module.expand)]
    layers = [module for module in inside if type(module) is nn.Linear and _is_large(module)]
    if not layers:
        raise UserError(
            f"train.fp8: no repeated block of {type(model).__name__} has a linear layer that is large enough to gain "
            "by it (768 by 3072, say); leave it out"
        )
    # In their places, with the weights, hooks and names that they have.
    for layer in layers:
        layer.__class__ = Fp8Linear
    for pair in pairs:
        pair.__class__ = Fp8FeedForward
    if isinstance(model, SumsLoss):
        model.fp8_head = not any(side % _MULTIPLE for side in model.output_weight.shape)
    if isinstance(model, HasStream):
        model.half_stream = True


def _is_large(layer: nn.Linear) -> bool:
    sides = layer.in_features, layer.out_features
    return not any(side % _MULTIPLE for side in sides) and sides[0] * sides[1] >= _LARGE * sum(sides)


class Fp8Linear(nn.Linear):
    """A linear layer computed in 8-bit floats."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` -> `[..., out]`."""
        rows = x.to(torch.bfloat16).flatten(0, -2)
        out: torch.Tensor = _Linear.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)


class Fp8FeedForward(FeedForward):
    """Both layers and the GELU between them, whose result is packed as it is computed and not kept: the backward pass
    computes it again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, dim]` -> the same shape."""
        rows, first, second = x.to(torch.bfloat16).flatten(0, -2), self.expand, self.project
        out: torch.Tensor = _FeedForward.apply(  # type: ignore[no-untyped-call]
            rows, first.weight, first.bias, second.weight, second.bias, self.gelu.approximate == "tanh"
        )
        result: torch.Tensor = self.project_dropout(out.view(*x.shape[:-1], -1))
        return result


class _Linear(torch.autograd.Function):
    """`rows @ weight.T + bias`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.has_bias = bias is not None
        return _product(*_pack_sampled(rows, _INPUT), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0].to(torch.bfloat16)
        of_rows = _product_back(*_pack_sampled(gradient, _GRADIENT), weight)
        return of_rows, *_of_weight(gradient, rows, weight, ctx.has_bias)


class _FeedForward(torch.autograd.Function):
    """`gelu(rows @ first.T + bias) @ second.T + bias`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        first: torch.Tensor,
        first_bias: torch.Tensor | None,
        second: torch.Tensor,
        second_bias: torch.Tensor | None,
        is_tanh: bool,
    ) -> torch.Tensor:
        before = _product(*_pack_sampled(rows, _INPUT), first, first_bias)
        ctx.save_for_backward(rows, before, first, second)
        ctx.is_tanh, ctx.has_bias = is_tanh, first_bias is not None
        scale = scale_for(F.gelu(before[::_SAMPLED], approximate=_name(is_tanh)), _INPUT, _TO_SPARE)
        return _product(gelu_packed(before, scale, is_tanh), scale.reciprocal(), second, second_bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, before, first, second = ctx.saved_tensors
        gradient = gradients[0].to(torch.bfloat16)
        of_after = _product_back(*_pack_sampled(gradient, _GRADIENT), second)
        some = torch.ops.aten.gelu_backward(of_after[::_SAMPLED], before[::_SAMPLED], approximate=_name(ctx.is_tanh))
        scale = scale_for(some, _GRADIENT, _TO_SPARE)
        after, of_before, packed = gelu_backward_packed(of_after, before, scale, ctx.is_tanh)
        of_rows = _product_back(packed, scale.reciprocal(), first)
        of_first = _of_weight(of_before, rows, first, ctx.has_bias)
        return of_rows, *of_first, *_of_weight(gradient, after, second, ctx.has_bias), None


def _name(is_tanh: bool) -> str:
    return "tanh" if is_tanh else "none"


def _product(
    packed: torch.Tensor, unscale: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    packed_weight, unscale_weight = pack(weight, _INPUT)
    return torch._scaled_mm(
        packed,
        packed_weight.t(),
        unscale,
        unscale_weight,
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _product_back(packed: torch.Tensor, unscale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of the rows from that of their product."""
    packed_weight, unscale_weight = pack(weight, _INPUT)
    columns = packed_weight.t().contiguous().t()
    return torch._scaled_mm(packed, columns, unscale, unscale_weight, out_dtype=torch.bfloat16)


def _of_weight(
    gradient: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of a weight and its bias."""
    of_bias = gradient.sum(0, dtype=torch.float32).to(weight.dtype) if has_bias else None
    return (gradient.t() @ rows).to(weight.dtype), of_bias


def _pack_sampled(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return pack(tensor, dtype, _SAMPLED, _TO_SPARE)


@torch.library.custom_op("shoal::gelu_packed", mutates_args=())
def _gelu_packed(before: torch.Tensor, scale: torch.Tensor, is_tanh: bool) -> torch.Tensor:
    from shoal.parallel import fp8_kernels

    packed = torch.empty_like(before, dtype=_INPUT)
    fp8_kernels.gelu_packed(before, scale, is_tanh, packed)
    return packed


@_gelu_packed.register_fake
def _(before: torch.Tensor, scale: torch.Tensor, is_tanh: bool) -> torch.Tensor:
    return torch.empty_like(before, dtype=_INPUT)


@torch.library.custom_op("shoal::gelu_backward_packed", mutates_args=())
def _gelu_backward_packed(
    gradient: torch.Tensor, before: torch.Tensor, scale: torch.Tensor, is_tanh: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from shoal.parallel import fp8_kernels

    after, of_before = torch.empty_like(before), torch.empty_like(before)
    packed = torch.empty_like(before, dtype=_GRADIENT)
    fp8_kernels.gelu_backward_packed(gradient, before, scale, is_tanh, after, of_before, packed)
    return after, of_before, packed


@_gelu_backward_packed.register_fake
def _(
    gradient: torch.Tensor, before: torch.Tensor, scale: torch.Tensor, is_tanh: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(before), torch.empty_like(before), torch.empty_like(before, dtype=_GRADIENT)


def gelu_packed(before: torch.Tensor, scale: torch.Tensor, is_tanh: bool) -> torch.Tensor:
    """`gelu(before) * scale`, packed."""
    return cast(torch.Tensor, _gelu_packed(before, scale, is_tanh))


def gelu_backward_packed(
    gradient: torch.Tensor, before: torch.Tensor, scale: torch.Tensor, is_tanh: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`gelu(before)`, and from the gradient of that the one of `before`, as it is and packed times `scale`."""
    return cast(
        "tuple[torch.Tensor, torch.Tensor, torch.Tensor]", _gelu_backward_packed(gradient, before, scale, is_tanh)
    )
