"""A model built without memory, and its initial weights one at a time: to the last bit those it would have had.

The constructor runs on fake tensors, which have a shape and no memory, while every operation on them is written down.
Carried out later, in the same order and with the same random numbers, they give the same weights. What is finished, or
will be written over, is let go of at once, so that never much more than the largest tensor is in memory.

Fake tensors rather than the meta device: some libraries, torch's own among them, see that device and skip their
initialisation.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shoal.core.errors import UserError

_FILLS = frozenset({"uniform_", "normal_", "zero_", "fill_", "exponential_", "log_normal_", "cauchy_", "copy_"})
"""Operations that write to every element of their first argument, whatever it held."""


class CannotDeferError(Exception):
    """The constructor looks at values, which fake tensors have not; the model must be built in memory."""


@dataclass(frozen=True)
class _View:
    """A fake tensor, as it was when an operation got or gave it."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    num_bytes: int
    """Of the storage."""

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same view of memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    @property
    def is_all(self) -> bool:
        """Whether there is nothing else in the storage."""
        return math.prod(self.size) * self.dtype.itemsize == self.num_bytes


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    results: list[_View | None]
    touches: tuple[int, ...]
    """Storages that it reads or writes."""
    fills: int | None
    """The one that it writes over, if it does."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what is done to fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.made: set[int] = set()
        """Storages that an operation has made."""
        self._alive: list[torch.UntypedStorage] = []
        """Kept, so that no other gets the address of one that is gone."""

    def view(self, tensor: torch.Tensor) -> _View:
        """What to know of a fake tensor."""
        storage = tensor.untyped_storage()
        offset = int(tensor.storage_offset())
        return _View(storage._cdata, tensor.size(), tensor.stride(), offset, tensor.dtype, storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
            raise CannotDeferError("it draws from a generator of its own")
        given: tuple[Any, Any] = tree_map(self._note, (args, kwargs))
        found = func(*args, **kwargs)
        results = [self._note(tensor) if isinstance(tensor, torch.Tensor) else None for tensor in tree_leaves(found)]
        views = [leaf for leaf in [*tree_leaves(given), *results] if isinstance(leaf, _View)]
        new = {view.storage for view in results if isinstance(view, _View)} - self.made
        if views and (func._schema.is_mutable or new):  # else it is a view of what is known, or none of ours
            self.made |= new
            touches = tuple(dict.fromkeys(view.storage for view in views))
            fills = _filled(func, given[0], given[1])
            self.operations.append(_Operation(func, given[0], given[1], results, touches, fills))
        return found

    @contextlib.contextmanager
    def knowing_trunc_normal(self) -> Iterator[None]:
        """Write down a truncated normal distribution as one operation: it draws until all values are within bounds."""
        carry_out = nn.init._no_grad_trunc_normal_

        def note(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not isinstance(tensor, FakeTensor):
                return carry_out(tensor, *args, **kwargs)
            view = self._note(tensor)
            fills = view.storage if view.is_all else None
            self.operations.append(_Operation(carry_out, (view, *args), kwargs, [None], (view.storage,), fills))
            return tensor

        nn.init._no_grad_trunc_normal_ = note
        try:
            yield
        finally:
            nn.init._no_grad_trunc_normal_ = carry_out

    def _note(self, value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        self._alive.append(value.untyped_storage())
        return self.view(value)


def _filled(function: Any, args: Any, kwargs: Any) -> int | None:
    """The storage that an operation writes over, if it does."""
    if function._schema.name.removeprefix("aten::") not in _FILLS or not isinstance(args[0], _View):
        return None
    read = [leaf.storage for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, _View)]
    return args[0].storage if args[0].is_all and args[0].storage not in read else None


class Deferred:
    """A model without memory, and the way to its weights."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        """Run `build`; `CannotDeferError` where that needs values."""
        self._rng_state = torch.get_rng_state()
        recorder = _Recorder()
        try:
            with FakeTensorMode(), recorder, recorder.knowing_trunc_normal():
                self.model = build()
        except (UserError, CannotDeferError):
            raise
        except Exception as error:  # an error of the model's own shows again when it is built in memory
            raise CannotDeferError(f"{type(error).__name__}: {error}") from error
        self._operations = recorder.operations
        self._real: dict[str, torch.Tensor] = {}
        self._places: dict[int, list[tuple[str, _View]]] = {}
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if not isinstance(tensor, FakeTensor):
                self._real[name] = tensor.detach()
                continue
            view = recorder.view(tensor)
            if view.storage not in recorder.made:
                raise CannotDeferError(f"{name} was not made by an operation")
            self._places.setdefault(view.storage, []).append((name, view))
        _put_on_meta(self.model)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter and buffer, by its first name, whole and on the CPU. To be copied from, and not kept."""
        yield from self._real.items()
        storages: dict[int, torch.UntypedStorage] = {}
        finished, done_with = self._ends()
        state = self._rng_state
        for number, operation in enumerate(self._operations):
            if not number or finished[number - 1]:  # others may have drawn meanwhile
                torch.set_rng_state(state)
            with torch.no_grad():
                _carry_out(operation, storages)
            if finished[number]:
                state = torch.get_rng_state()
            for storage in finished[number]:
                for name, view in self._places[storage]:
                    yield name, view.of(storages[storage])
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
            for number, following in zip(numbers, numbers[1:], strict=False):
                if self._operations[following].fills == storage:
                    done_with[number].append(storage)
        return finished, done_with


def _carry_out(operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
    """The same with memory."""

    def real(value: Any) -> Any:
        if isinstance(value, _View):
            if value.storage not in storages:  # it was let go of, because it is written over now
                storages[value.storage] = torch.UntypedStorage(value.num_bytes)  # type: ignore[no-untyped-call]
            return value.of(storages[value.storage])
        return value

    args, kwargs = tree_map(real, (operation.args, operation.kwargs), is_leaf=lambda leaf: isinstance(leaf, _View))
    found = tree_leaves(operation.function(*args, **kwargs))
    if operation.function is torch.ops.aten.lift_fresh.default:  # of a constant, which must stay what it is
        found = [tensor.clone() for tensor in found]
    for view, tensor in zip(operation.results, found, strict=True):
        if view is not None and view.storage not in storages:
            assert tensor.stride() == view.stride, f"{operation.function} lays out its result otherwise on the CPU"
            storages[view.storage] = tensor.untyped_storage()


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


def _on_meta(tensor: torch.Tensor, ordinary: Collection[str]) -> torch.Tensor:
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    # What others have noted on it: that it is not to be decayed, say.
    parameter.__dict__.update({name: value for name, value in tensor.__dict__.items() if name not in ordinary})
    return parameter
