"""A model built without memory, and its initial weights one at a time: to the last bit those it would have had.

The constructor runs on fake tensors, which have a shape and no memory, while every operation on them is written down.
Carried out later, in the same order and with the same random numbers, they give the same weights. What is finished, or
will be written over, is let go of at once, so that never much more than the largest tensor is in memory.
"""

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from shoal.core.errors import UserError
from shoal.core.record import CannotDeferError, FakeMode, Recorder, View, carry_out

__all__ = ["CannotDeferError", "Deferred", "check_others"]


class Deferred:
    """A model without memory, and the way to its weights."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        """Run `build`; `CannotDeferError` where that must run in memory. torch's random generator stays as it is."""
        self._rng_state = torch.get_rng_state()
        recorder = Recorder()
        try:
            with _quiet(), FakeMode(), recorder, recorder.knowing_trunc_normal():
                self.model = build()
                recorder.check_generator()
        except (UserError, CannotDeferError):
            raise
        except Exception as error:  # an error of the model's own shows again when it is built in memory
            raise CannotDeferError(f"{type(error).__name__}: {error}") from error
        finally:
            torch.set_rng_state(self._rng_state)
        self._operations = recorder.operations
        self._real: dict[str, torch.Tensor] = {}
        self._places: dict[int, list[tuple[str, View]]] = {}
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if not isinstance(tensor, FakeTensor):
                self._real[name] = tensor.detach()
                continue
            view = recorder.view(tensor)
            if view.storage not in recorder.made:
                raise CannotDeferError(f"{name} was not made by an operation")
            self._places.setdefault(view.storage, []).append((name, view))
        _check_attributes(self.model)
        _check_hooks(self.model)
        _put_on_meta(self.model)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter and buffer, by its first name, whole and on the CPU. To be copied from, and not kept.

        As often as they are asked for. When they have all come, torch's random generator is where building the model in
        memory would have left it.
        """
        yield from self._real.items()
        storages: dict[int, torch.UntypedStorage] = {}
        finished, done_with = self._ends()
        torch.set_rng_state(self._rng_state)
        for number, operation in enumerate(self._operations):
            with torch.no_grad():
                carry_out(operation, storages)
            for storage in finished[number]:
                state = torch.get_rng_state()
                for name, view in self._places[storage]:
                    yield name, view.of(storages[storage])
                torch.set_rng_state(state)  # others may have drawn meanwhile
            for storage in done_with[number]:
                storages.pop(storage, None)

    def _ends(self) -> tuple[list[list[int]], list[list[int]]]:
        """By operation: storages of the model that are finished with it, and those that may go."""
        finished: list[list[int]] = [[] for _ in self._operations]
        done_with: list[list[int]] = [[] for _ in self._operations]
        touched: dict[int, list[int]] = {}
        for number, operation in enumerate(self._operations):
            for storage in operation.touches:
                touched.setdefault(storage, []).append(number)
        for storage, numbers in touched.items():
            if storage in self._places:
                finished[numbers[-1]].append(storage)
            done_with[numbers[-1]].append(storage)
            for number, following in itertools.pairwise(numbers):
                if self._operations[following].fills == storage:
                    done_with[number].append(storage)
        return finished, done_with


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch telling at length of what a fake tensor cannot do: the caller is told in short."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    saved, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # a deep copy does that
            yield
    finally:
        logger.disabled = saved


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module holds in its attributes that has to do with fake tensors, a list of them say."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value)):
            yield name, value


def _check_attributes(model: nn.Module) -> None:
    """A tensor that is neither parameter nor buffer would stay without memory, for nobody fills it."""
    known = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    for path, module in model.named_modules():
        for name, value in _attributes(module):
            if any(isinstance(leaf, FakeTensor) and id(leaf) not in known for leaf in tree_leaves(value)):
                raise CannotDeferError(f"{path}.{name}".strip(".") + " is a tensor, and no parameter or buffer")


def _check_hooks(model: nn.Module) -> None:
    """The parameters that take the place of the fake ones would not have them."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CannotDeferError(f"{name} has a hook on its gradient")


def check_others(values: Mapping[str, Any]) -> None:
    """`CannotDeferError` where one of these, which whoever built a model has kept, is left without memory by that."""
    for name, value in values.items():
        for leaf in tree_leaves(value):
            tensors = [*leaf.parameters(), *leaf.buffers()] if isinstance(leaf, nn.Module) else [leaf]
            if any(isinstance(tensor, FakeTensor) for tensor in tensors):
                raise CannotDeferError(f"{name} holds another one")


def _put_on_meta(model: nn.Module) -> None:
    """Meta tensors in place of the fake ones, which work outside of their mode; what is shared stays shared."""
    with FakeTensorMode():
        ordinary = nn.Parameter(torch.empty(0)).__dict__.keys()
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _on_meta(tensor, ordinary)
                held[name] = made[id(tensor)]  # type: ignore[assignment]
    for module in model.modules():
        for name, value in list(_attributes(module)):  # LSTMs list their weights
            vars(module)[name] = tree_map(lambda leaf: made.get(id(leaf), leaf), value)


def _on_meta(tensor: torch.Tensor, ordinary: Collection[str]) -> torch.Tensor:
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if torch.empty_like(empty).stride() != empty.stride():  # with gaps, or seen many times: it gets memory of its own
        empty = torch.empty(tensor.size(), dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    # What others have noted on it: that it is not to be decayed, say.
    parameter.__dict__.update({name: value for name, value in tensor.__dict__.items() if name not in ordinary})
    return parameter
