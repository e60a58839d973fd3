"""What of a step goes through torch.compile."""

import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from shoal.core.move import leaves
from shoal.core.objective import LossResult, Objective
from shoal.models.blocks import repeated_blocks

_NUMBERS = itertools.count(1)


def compiled(model: nn.Module, by_block: bool = False) -> nn.Module:
    """The model to call, through torch.compile.

    By block: each repeated block by itself, where what is between them (gathering weights, sending) is not compiled.
    """
    if by_block and (blocks := repeated_blocks(model)):
        for _, block in blocks:
            block.compile()
        return model
    # Wrapped rather than compiled in place: in place, a plain nn.Sequential silently stays as it is.
    return cast(nn.Module, torch.compile(model))


def compiled_loss(objective: Objective, model: nn.Module, usual_size: int) -> Callable[[Any], LossResult]:
    """The loss of a batch, with the model and what follows it compiled as one: what is between them is fused.

    A batch of fewer samples than usual, which comes once an epoch, is not worth a compilation of its own. Workers whose
    number does not divide a step's samples have one more or less of them.
    """

    def loss_of(batch: Any) -> LossResult:
        return objective.loss(model, batch)

    # What torch.compile learns of sizes it keeps by a function's name: another model in this process has its own.
    loss_of.__code__ = loss_of.__code__.replace(co_name=f"loss_of_model_{next(_NUMBERS)}")
    fast = cast("Callable[[Any], LossResult]", torch.compile(loss_of))
    return lambda batch: (fast if (batch_size(batch) or usual_size) >= usual_size - 1 else loss_of)(batch)


def batch_size(batch: Any) -> int | None:
    """The length of the first tensor in it."""
    return next((len(leaf) for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
