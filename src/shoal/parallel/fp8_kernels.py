"""GPU kernels that compute a GELU, or its derivative, and pack the result into 8-bit floats while they have it."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_SLOPE = tl.constexpr(1.5957691216057308)
"""Twice the square root of 2/pi."""
_CUBE = tl.constexpr(0.044715)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)
"""Of the normal distribution at 0."""


@triton.jit  # type: ignore[untyped-decorator]
def _share(x, is_tanh: tl.constexpr):  # type: ignore[no-untyped-def]
    """What of `x` a GELU lets through."""
    if is_tanh:
        return tl.sigmoid(_SLOPE * (x + _CUBE * x * x * x))
    return 0.5 * (1.0 + tl.erf(x * _ROOT_HALF))


@triton.jit  # type: ignore[untyped-decorator]
def _forward(before, scale, packed, size, most, is_tanh: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    x = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
    after = x * _share(x, is_tanh) * tl.load(scale)
    after = tl.minimum(tl.maximum(after, -most), most)
    tl.store(packed + at, after.to(packed.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    gradient, before, scale, after, of_before, packed, size, most, is_tanh: tl.constexpr, block: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    x = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
    share = _share(x, is_tanh)
    tl.store(after + at, (x * share).to(after.dtype.element_ty), mask=inside)
    if is_tanh:
        slope = share + x * share * (1.0 - share) * _SLOPE * (1.0 + 3.0 * _CUBE * x * x)
    else:
        slope = share + x * _DENSITY * tl.exp(-0.5 * x * x)
    found = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * slope
    tl.store(of_before + at, found.to(of_before.dtype.element_ty), mask=inside)
    found = tl.minimum(tl.maximum(found * tl.load(scale), -most), most)
    tl.store(packed + at, found.to(packed.dtype.element_ty), mask=inside)


def gelu_packed(before: torch.Tensor, scale: torch.Tensor, is_tanh: bool, packed: torch.Tensor) -> None:
    """`gelu(before) * scale` into `packed`, of an 8-bit type; what is beyond its range is cut off."""
    size, most = before.numel(), torch.finfo(packed.dtype).max
    _forward[(triton.cdiv(size, _BLOCK),)](before, scale, packed, size, most, is_tanh, _BLOCK, num_warps=8)


def gelu_backward_packed(
    gradient: torch.Tensor,
    before: torch.Tensor,
    scale: torch.Tensor,
    is_tanh: bool,
    after: torch.Tensor,
    of_before: torch.Tensor,
    packed: torch.Tensor,
) -> None:
    """From the gradient of a GELU's output that of its input, into `of_before`, and times `scale` into `packed`; and
    the output once more, into `after`."""
    size, most = before.numel(), torch.finfo(packed.dtype).max
    _backward[(triton.cdiv(size, _BLOCK),)](
        gradient, before, scale, after, of_before, packed, size, most, is_tanh, _BLOCK, num_warps=8
    )
