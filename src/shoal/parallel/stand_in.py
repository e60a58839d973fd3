"""What a task is given for a model that no worker has as a whole: something that asks for the model's inputs, or
answers with its output."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.core.errors import UserError

Inputs = tuple[torch.Tensor, ...]

_INSTEAD = "call it once, as model(inputs), with tensors alone; nearest that works: parallel.strategy fsdp"


class _ReachedError(BaseException):
    """The task has called the model. Not an `Exception`, which it might catch."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.inputs = inputs


class _StandIn:
    """As much of a model as a task may use: that it can be called, and whether it is training."""

    sums_loss = False
    """Not even where the model does: its output is on another worker than its beginning."""

    def __init__(self, model: nn.Module, where: str) -> None:
        self._model = model
        self._where = where

    @property
    def training(self) -> bool:
        """As of the model itself."""
        return self._model.training

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._model, name):
            raise UserError(f"{self._where} uses model.{name}, but a pipeline has no worker with all of it; {_INSTEAD}")
        raise AttributeError(f"{type(self._model).__name__!r} object has no attribute {name!r}")

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        others = [type(arg).__name__ for arg in args if not isinstance(arg, torch.Tensor)]
        if kwargs or others or not args:
            given = f"{next(iter(kwargs))}=..." if kwargs else f"a {others[0]}" if others else "nothing"
            raise UserError(f"{self._where} calls the model with {given}; in a pipeline, {_INSTEAD}")
        sizes = [tensor.shape[0] if tensor.ndim else None for tensor in args]
        if None in sizes or len(set(sizes)) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in args)
            raise UserError(
                f"{self._where} calls the model with tensors of shapes {shapes}; in a pipeline, the first dimension of "
                "each must be the samples"
            )
        return args


class _Asking(_StandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _ReachedError(self._checked(args, kwargs))


class _Answering(_StandIn):
    def __init__(self, model: nn.Module, where: str, output: Any, again: bool) -> None:
        super().__init__(model, where)
        self._output = output
        self._again = again
        self._inputs: Inputs | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs, before = self._checked(args, kwargs), self._inputs
        self._inputs = inputs
        if before is not None and not (self._again and _same(before, inputs)):
            raise UserError(f"{self._where} calls the model twice; in a pipeline, {_INSTEAD}")
        return self._output


def _same(left: Inputs, right: Inputs) -> bool:
    return len(left) == len(right) and all(a is b or torch.equal(a, b) for a, b in zip(left, right, strict=True))


def ask_for_inputs(call: Callable[[Any], Any], model: nn.Module, where: str) -> Inputs:
    """What `call`, given a model, calls it with; what comes after that is not run."""
    try:
        call(_Asking(model, where))
    except _ReachedError as reached:
        return reached.inputs
    raise UserError(f"{where} does not call the model it is given; in a pipeline, {_INSTEAD}")


def answer(call: Callable[[Any], Any], model: nn.Module, where: str, output: Any, *, again: bool = False) -> Any:
    """What `call` makes of the model's output; it may ask `again` with the same inputs."""
    return call(_Answering(model, where, output, again))


def nothing_of(output: Any) -> torch.Tensor:
    """Zero, as a loss that depends on a model's output: the backward pass runs, and adds nothing."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    terms = [(leaf * 0.0).sum().float() for leaf in leaves] or [torch.zeros((), requires_grad=True)]
    return torch.stack(terms).sum()
