"""Which parameters a backward pass reaches."""

import torch
from torch import nn


def parameters_without_gradient(model: nn.Module, inputs: torch.Tensor) -> list[str]:
    """The names of the parameters whose gradient is missing or zero everywhere after one backward pass."""
    torch.manual_seed(1)
    logits = model(inputs)
    (logits * torch.randn_like(logits)).sum().backward()
    return [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
