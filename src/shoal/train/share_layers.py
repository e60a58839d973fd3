"""A model with one worker's part of every layer, as tensor parallel leaves it there; without any other worker."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.parallel.tensor_plan import Plan
from shoal.parallel.ties import tie_again, tied_names


class Traffic:
    """How workers that share layers talk: nothing is sent, but copies are made as if, and bytes are counted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = 0

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """As torch does it: received one after the other along the first dimension, then put in place."""
        received = torch.cat([part] * self.size)
        self._count(received)
        return torch.cat(received.chunk(self.size), dim=dim)

    def divide(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """The sum over all workers, of which each keeps a part."""
        self._count(whole)
        in_order = torch.cat(whole.chunk(self.size, dim=dim))
        return in_order[: in_order.shape[0] // self.size].clone()

    def sum(self, whole: torch.Tensor) -> torch.Tensor:
        """Over all workers."""
        self._count(whole)
        self._count(whole)
        return whole.clone()

    def _count(self, whole: torch.Tensor) -> None:
        self.sent += whole.numel() * whole.element_size() * (self.size - 1) // self.size


def share_layers(model: nn.Module, plan: Plan, sequence: bool) -> Traffic:
    """Leave of each layer what one of `plan.size` workers has, and what they send each other as copies of that size.

    Numbers mean nothing afterwards: this is for tracing sizes.
    """
    size, ties, traffic = plan.size, tied_names(model), Traffic(plan.size)
    for name, word in plan.words.items():
        module = model.get_submodule(name)
        if word in ("columns", "logits", "vocabulary"):
            _keep_rows(module, size)
        elif word == "rows":
            assert isinstance(module, nn.Linear)
            module.weight = nn.Parameter(module.weight.detach()[:, : module.in_features // size].clone())
        _change_inputs(module, word, traffic, sequence)
        _change_outputs(module, word, traffic, sequence)
    tie_again(model, ties)
    return traffic


def _keep_rows(module: nn.Module, size: int) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        rows = -(-parameter.shape[0] // size)
        setattr(module, name, nn.Parameter(parameter.detach()[:rows].clone(), requires_grad=parameter.requires_grad))


def _change_inputs(module: nn.Module, word: str, traffic: Traffic, sequence: bool) -> None:
    if word in ("gather", "logits"):
        change = partial(_gathered, traffic, 1) if sequence else partial(_Summed.apply, traffic, False)
        module.register_forward_pre_hook(lambda _, inputs: (change(inputs[0]), *inputs[1:]))


def _change_outputs(module: nn.Module, word: str, traffic: Traffic, sequence: bool) -> None:
    summed = partial(_Summed.apply, traffic, True)
    changes: dict[str, Callable[[torch.Tensor], Any]] = {"vocabulary": summed, "rows": summed}
    changes["logits"] = partial(_gathered, traffic, -1)
    if sequence:
        divided = partial(_Divided.apply, traffic, 1)
        changes |= {"rows": divided, "split": divided, "join": partial(_gathered, traffic, 1)}
    if word in changes:
        change = changes[word]
        module.register_forward_hook(lambda _, inputs, output: change(output))


def _gathered(traffic: Traffic, dim: int, part: torch.Tensor) -> Any:
    return _Gathered.apply(traffic, dim, part)  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    """Every worker's part, put together; what is sent back is summed and divided."""

    @staticmethod
    def forward(context: Any, traffic: Traffic, dim: int, part: torch.Tensor) -> torch.Tensor:
        context.how = (traffic, dim)
        return traffic.gather(part, dim)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        traffic, dim = context.how
        return None, None, traffic.divide(gradient, dim)


class _Divided(torch.autograd.Function):
    """Summed over the workers, of which each keeps a part; what is sent back is put together."""

    @staticmethod
    def forward(context: Any, traffic: Traffic, dim: int, whole: torch.Tensor) -> torch.Tensor:
        context.how = (traffic, dim)
        return traffic.divide(whole, dim)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        traffic, dim = context.how
        return None, None, traffic.gather(gradient, dim)


class _Summed(torch.autograd.Function):
    """Summed over the workers in one direction, and left alone in the other."""

    @staticmethod
    def forward(context: Any, traffic: Traffic, is_forward: bool, whole: torch.Tensor) -> torch.Tensor:
        context.how = (traffic, is_forward)
        return traffic.sum(whole) if is_forward else whole.view_as(whole)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        traffic, is_forward = context.how
        return None, None, gradient if is_forward else traffic.sum(gradient)
