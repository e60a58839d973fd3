"""What a strategy must know of a task: how wrong the model is on a batch, and how to measure it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.core.errors import UserError

Count = torch.Tensor | int
LossResult = torch.Tensor | tuple[torch.Tensor, Count]
"""The mean over the samples of a batch, or (sum, count of the items summed over)."""

Measured = dict[str, tuple[torch.Tensor | float, Count]]
"""name -> (sum, count)"""


@dataclass(frozen=True)
class Objective:
    """The functions of a task that run inside a step or an evaluation."""

    loss: Callable[[nn.Module, Any], LossResult]
    metrics: Callable[[nn.Module, Any, int], Measured]
    """(model, batch, samples in it) -> what evaluation adds up; always holds "loss"."""
    count: Callable[[Any], Count] | None = None
    """Items that `loss` will sum over in a batch, where that is known before the forward pass."""
    items: str = "samples"
    """What is counted: samples or tokens."""
    is_traceable: bool = False
    """Whether `loss` is plain tensor arithmetic, which torch.compile and CUDA graphs may take as a whole."""


def check_loss(loss: Any, trains: bool = False) -> None:
    """Raise `UserError` unless a task's loss is what it should be."""
    value = loss[0] if isinstance(loss, tuple) and len(loss) == 2 else loss
    if not isinstance(value, torch.Tensor) or value.ndim != 0:
        what = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(type(loss).__name__)
        )
        raise UserError(f"task.loss returned {what}; return the mean over the batch (a scalar tensor) or (sum, count)")
    if trains and not value.requires_grad:
        raise UserError("task.loss does not depend on a parameter that trains; compute it from what model(...) returns")
