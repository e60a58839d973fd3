"""The output projection and its cross-entropy in one, on NVIDIA GPUs: never all logits at a time.

The logits of a language model are its largest tensor by far. Here a part of the tokens is projected, one kernel turns
their logits into losses and gradients in place, and these are used up before the next part comes: the memory of all
logits is saved, and two of their five journeys to the GPU's memory and back. What is computed is what autocast computes
in parts: products of half precision, softmax in fp32, gradients rounded once.
"""

from typing import Any

import torch
from torch import nn

from shoal.core.float8 import pack

IGNORE = -100
"""Target that is not counted: the one that PyTorch's own cross-entropy leaves out."""
_MOST_LOGITS = 1 << 30
"""That are there at a time."""
_GRADIENT_SCALE = 2.0**15
"""Gradients of logits are differences of probabilities, so of at most 1: what brings them into the range of e5m2."""


class SumsLoss(nn.Module):
    """A language model that takes targets too, and then returns the sum of their cross-entropy."""

    sums_loss = False
    """Whether it may be given targets: its weights are whole, and on a GPU that can."""
    fp8_head = False
    """Whether the output projection is then computed in 8-bit floats."""

    @property
    def output_weight(self) -> torch.Tensor:
        """`[vocabulary, dim]`."""
        raise NotImplementedError


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, fp8: bool = False
) -> torch.Tensor:
    """The cross-entropy of `hidden @ weight.T` summed over the targets that count.

    Args:
        hidden: `[tokens, dim]`, of the type that is computed with.
        weight: `[vocabulary, dim]`, of any type; its gradient is of the same.
        targets: `[tokens]`, int64; `IGNORE` is not counted.
        fp8: Project, and compute the gradient of `hidden`, in 8-bit floats.
    """
    needs_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    packed: list[torch.Tensor] = []
    if fp8:  # here, where torch.compile sees it
        with torch.no_grad():
            of_hidden, of_weight = (pack(tensor, torch.float8_e4m3fn) for tensor in (hidden, weight))
            packed = [*of_hidden, *of_weight, of_weight[0].t().contiguous()]
    loss: torch.Tensor = _summed(hidden, weight, targets, packed, needs_gradients)[0]
    return loss


@torch.library.custom_op("shoal::linear_cross_entropy", mutates_args=())
def _summed(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    packed: list[torch.Tensor],
    needs_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, and the gradients of `hidden` and `weight` by it, which are of no size where nobody needs them.

    `packed`: hidden and weight in 8-bit floats, each with by what to scale back, and the weight the other way round.
    """
    from shoal.models.cross_entropy_kernel import losses_and_gradients_

    hidden = hidden.contiguous()
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    of_hidden = torch.empty_like(hidden) if needs_gradients else hidden.new_empty(0)
    of_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if needs_gradients else weight.new_empty(0)
    products = _Fp8(hidden.dtype, *packed) if packed else _Plain(hidden, weight.to(hidden.dtype))
    for first, last in _parts(len(hidden), len(weight)):
        logits = products.logits(first, last)
        small = torch.empty_like(logits, dtype=torch.float8_e5m2) if packed and needs_gradients else None
        losses_and_gradients_(logits, targets[first:last], losses[first:last], small, _GRADIENT_SCALE)
        if needs_gradients:
            products.gradients_of_hidden(logits, small, of_hidden[first:last])
            of_weight = torch.addmm(of_weight, logits.t(), hidden[first:last], out_dtype=torch.float32)
        del logits, small  # before the next
    return losses.sum(), of_hidden, of_weight.to(weight.dtype)


class _Plain:
    """Products in the type that is computed with."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        self.hidden, self.weight = hidden, weight

    def logits(self, first: int, last: int) -> torch.Tensor:
        return self.hidden[first:last] @ self.weight.t()

    def gradients_of_hidden(self, logits: torch.Tensor, small: torch.Tensor | None, out: torch.Tensor) -> None:
        torch.mm(logits, self.weight, out=out)


class _Fp8:
    """Products in 8-bit floats, added up in more."""

    def __init__(self, dtype: torch.dtype, *packed: torch.Tensor) -> None:
        self.dtype = dtype
        self.hidden, self.unscale_hidden, self.weight, self.unscale_weight, self.weight_by_column = packed
        self.unscale_gradient = torch.full((), 1 / _GRADIENT_SCALE, device=self.hidden.device)

    def logits(self, first: int, last: int) -> torch.Tensor:
        unscale = self.unscale_hidden, self.unscale_weight
        return torch._scaled_mm(
            self.hidden[first:last], self.weight.t(), *unscale, out_dtype=self.dtype, use_fast_accum=True
        )

    def gradients_of_hidden(self, logits: torch.Tensor, small: torch.Tensor | None, out: torch.Tensor) -> None:
        assert small is not None
        unscale = self.unscale_gradient, self.unscale_weight
        out.copy_(torch._scaled_mm(small, self.weight_by_column.t(), *unscale, out_dtype=self.dtype))


def _parts(num_tokens: int, vocabulary: int) -> list[tuple[int, int]]:
    """Parts of about the same size, whose logits fit."""
    count = -(-num_tokens * vocabulary // _MOST_LOGITS)
    size = -(-num_tokens // (count * 128)) * 128
    return [(first, min(first + size, num_tokens)) for first in range(0, num_tokens, size)]


@_summed.register_fake
def _(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    packed: list[torch.Tensor],
    needs_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loss = hidden.new_empty((), dtype=torch.float32)
    if not needs_gradients:
        return loss, hidden.new_empty(0), weight.new_empty(0)
    return loss, torch.empty_like(hidden, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.num_packed = len(inputs[3])
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    of_hidden, of_weight = ctx.saved_tensors
    return of_hidden * gradient, of_weight * gradient, None, [None] * ctx.num_packed, None


_summed.register_autograd(_backward, setup_context=_keep)
