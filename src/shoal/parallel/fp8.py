"""Linear layers whose products are computed in 8-bit floats, on GPUs that can.

Inputs and weights travel as e4m3, gradients as e5m2; products are added up in more, and come out as bfloat16. The
gradient of the weights, which adds up over all tokens, stays in bfloat16.

Every tensor is scaled into the range of its type as it comes, by the largest of its values: of weights all are looked
at, of the others every sixteenth row, with two bits to spare and what is larger still cut off. So there is no state to
keep, and little to read twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shoal.core.errors import UserError
from shoal.models.blocks import repeated_blocks
from shoal.models.linear_cross_entropy import SumsLoss
from shoal.models.transformer import FeedForward, HasStream

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
    """Have the linear layers of a model's blocks, and its fused output projection, computed so from here on."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST:
        raise UserError("train.fp8: needs a GPU with 8-bit floats (NVIDIA Ada, Hopper or newer); leave it out")
    layers = [
        layer
        for _, block in repeated_blocks(model)
        for layer in block.modules()
        if type(layer) is nn.Linear and _is_large(layer)
    ]
    if not layers:
        raise UserError(
            f"train.fp8: no repeated block of {type(model).__name__} has a linear layer that is large enough to gain "
            "by it (768 by 3072, say); leave it out"
        )
    # In their places, with the weights, hooks and names that they have.
    for layer in layers:
        layer.__class__ = Fp8Linear
    for module in model.modules():
        if type(module) is FeedForward and isinstance(module.project, Fp8Linear):
            module.__class__ = Fp8FeedForward
    if isinstance(model, SumsLoss):
        model.fp8_head = True
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
        out: torch.Tensor = _Product.apply(rows, self.weight)  # type: ignore[no-untyped-call]
        out = out.view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class Fp8FeedForward(FeedForward):
    """The same of its second layer, together with the GELU before it.

    What comes out of the GELU is packed as it is computed and not kept; the backward pass computes it again.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, dim]` -> the same shape."""
        before, project = self.expand(x), self.project
        rows = before.to(torch.bfloat16).flatten(0, -2)
        out: torch.Tensor = _ProductOfGelu.apply(  # type: ignore[no-untyped-call]
            rows, project.weight, self.gelu.approximate
        )
        out = out.view(*before.shape[:-1], -1)
        result: torch.Tensor = self.project_dropout(out if project.bias is None else out + project.bias.to(out.dtype))
        return result


class _Product(torch.autograd.Function):
    """`rows @ weight.T`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0].to(torch.bfloat16)
        return _gradient_of_rows(gradient, weight), (gradient.t() @ rows).to(weight.dtype)


class _ProductOfGelu(torch.autograd.Function):
    """`gelu(rows) @ weight.T`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, approximate: str) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.approximate = approximate
        return _product(F.gelu(rows, approximate=approximate), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0].to(torch.bfloat16)
        of_gelu = _gradient_of_rows(gradient, weight)
        of_rows = torch.ops.aten.gelu_backward(of_gelu, rows, approximate=ctx.approximate)
        of_weight = gradient.t() @ F.gelu(rows, approximate=ctx.approximate)
        return of_rows, of_weight.to(weight.dtype), None


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    packed, scale = pack(rows, torch.float8_e4m3fn, sampled=True)
    packed_weight, weight_scale = pack(weight, torch.float8_e4m3fn)
    return torch._scaled_mm(
        packed, packed_weight.t(), scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _gradient_of_rows(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    packed, scale = pack(gradient, torch.float8_e5m2, sampled=True)
    packed_weight, weight_scale = pack(weight, torch.float8_e4m3fn)
    columns = packed_weight.t().contiguous().t()
    return torch._scaled_mm(packed, columns, scale, weight_scale, out_dtype=torch.bfloat16)


def pack(tensor: torch.Tensor, dtype: torch.dtype, sampled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor in an 8-bit type, scaled into its range; and by what to scale back."""
    most = torch.finfo(dtype).max
    seen, reach = (tensor[::_SAMPLED], most / _TO_SPARE) if sampled else (tensor, most)
    scale = reach / seen.abs().amax().float().clamp(min=1e-12)
    return (tensor.float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()
