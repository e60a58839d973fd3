"""One GPU kernel: logits in, losses out, and where the logits were the gradients."""

import torch
import triton
import triton.language as tl

from shoal.models import linear_cross_entropy

IGNORE = tl.constexpr(linear_cross_entropy.IGNORE)
_BLOCK = 2048
"""Logits that a program looks at at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    packed,
    packed_scale,
    row_stride,
    vocabulary: tl.constexpr,
    block: tl.constexpr,
    packs: tl.constexpr,
):
    """A row a program: once through it for the normaliser, and once more, mostly in the cache, for the gradients."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counts = target != IGNORE
    largest = -float("inf")
    total = 0.0
    for first in range(0, vocabulary, block):
        column = first + tl.arange(0, block)
        x = tl.load(logits + row * row_stride + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(x - higher), 0)
        largest = higher
    is_known = (target >= 0) & (target < vocabulary)
    # A target that there is not makes the loss no number, which the training notices.
    own = tl.load(logits + row * row_stride + target, mask=is_known, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(counts, tl.log(total) + largest - own, 0.0))
    share = tl.where(counts, 1.0 / total, 0.0)
    tl.debug_barrier()  # the target's logit has been read, and may be written over
    for first in range(0, vocabulary, block):
        column = first + tl.arange(0, block)
        inside = column < vocabulary
        x = tl.load(logits + row * row_stride + column, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(x - largest) * share
        gradient = tl.where((column == target) & counts, gradient - 1.0, gradient)
        tl.store(logits + row * row_stride + column, gradient.to(logits.dtype.element_ty), mask=inside)
        if packs:
            tl.store(packed + row * row_stride + column, (gradient * packed_scale).to(tl.float8e5), mask=inside)


def losses_and_gradients_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    packed: torch.Tensor | None,
    packed_scale: float,
) -> None:
    """Cross-entropy of every row into `losses`, and its gradients in the place of the logits.

    Where `packed` is given, the gradients go there as well: as e5m2, times `packed_scale`.
    """
    rows, vocabulary = logits.shape
    _kernel[(rows,)](
        logits,
        targets,
        losses,
        logits if packed is None else packed,
        packed_scale,
        logits.stride(0),
        vocabulary,
        _BLOCK,
        packed is not None,
        num_warps=4,
    )
