"""What a constructor does to fake tensors, written down, so that it can be carried out later with memory.

Fake tensors rather than the meta device: some libraries, torch's own among them, see that device and skip their
initialisation.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_FILLS = frozenset({"uniform_", "normal_", "zero_", "fill_", "exponential_", "log_normal_", "cauchy_", "copy_"})
"""Operations that write to every element of their first argument, whatever it held."""


class CannotDeferError(Exception):
    """The constructor needs values, which fake tensors have not, or does what cannot be repeated later: it must run in
    memory."""


@dataclass(frozen=True)
class View:
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
class Operation:
    """What was done, to what, and what came of it."""

    function: Any
    args: Any
    kwargs: Any
    results: list[View | None]
    touches: tuple[int, ...]
    """Storages that it reads or writes."""
    fills: int | None
    """The one that it writes over, if it does."""
    default_dtype: torch.dtype
    """What it makes a tensor of where it is not told."""


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """In which tensors are fake; a module that is deep-copied stays in it."""

    def __deepcopy__(self, memo: Any) -> "FakeMode":
        return self


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what is done to fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.made: set[int] = set()
        """Storages that an operation has made."""
        self._alive: list[torch.UntypedStorage] = []
        """Kept, so that no other gets the address of one that is gone."""
        self._generator = torch.get_rng_state()

    def view(self, tensor: torch.Tensor) -> View:
        """What to know of a fake tensor."""
        storage = tensor.untyped_storage()
        offset = int(tensor.storage_offset())
        return View(storage._cdata, tensor.size(), tensor.stride(), offset, tensor.dtype, storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _refuse_what_cannot_be_repeated((args, kwargs))
        given: tuple[Any, Any] = tree_map(self._note, (args, kwargs))
        found = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draw()
        results = [self._note(tensor) if isinstance(tensor, torch.Tensor) else None for tensor in tree_leaves(found)]
        views = [leaf for leaf in [*tree_leaves(given), *results] if isinstance(leaf, View)]
        new = {view.storage for view in results if isinstance(view, View)} - self.made
        if views and (func._schema.is_mutable or new):  # else it is a view of what is known, or none of ours
            self.made |= new
            touches = tuple(dict.fromkeys(view.storage for view in views))
            fills = _filled(func, given[0], given[1])
            self.operations.append(
                Operation(func, given[0], given[1], results, touches, fills, torch.get_default_dtype())
            )
        return found

    def _draw(self) -> None:
        """Move the generator on, as the operation itself would: so it shows if somebody else puts it elsewhere."""
        self.check_generator()
        with _disable_current_modes():
            torch.rand(1)
            self._generator = torch.get_rng_state()

    def check_generator(self) -> None:
        """Random numbers must come one after the other; what seeds, or goes back, cannot be repeated."""
        with _disable_current_modes():
            if not torch.equal(torch.get_rng_state(), self._generator):
                raise CannotDeferError("it sets the seed or the state of torch's random generator")

    @contextlib.contextmanager
    def knowing_trunc_normal(self) -> Iterator[None]:
        """Write down a truncated normal distribution as one operation: it draws until all values are within bounds."""
        its_own = nn.init._no_grad_trunc_normal_

        def note(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not isinstance(tensor, FakeTensor):
                return its_own(tensor, *args, **kwargs)
            _refuse_what_cannot_be_repeated((args, kwargs))
            self._draw()
            view = self._note(tensor)
            fills = view.storage if view.is_all else None
            dtype = torch.get_default_dtype()
            self.operations.append(Operation(its_own, (view, *args), kwargs, [None], (view.storage,), fills, dtype))
            return tensor

        nn.init._no_grad_trunc_normal_ = note
        try:
            yield
        finally:
            nn.init._no_grad_trunc_normal_ = its_own

    def _note(self, value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        if value.device.type == "meta":
            raise CannotDeferError("it makes tensors without values, or reads them with torch.load")
        if value.device.type != "cpu":
            raise CannotDeferError(f"it makes tensors on {value.device}")
        if value.is_conj() or value.is_neg():
            raise CannotDeferError("it makes a tensor that is the conjugate of another in memory")
        self._alive.append(value.untyped_storage())
        return self.view(value)


def _refuse_what_cannot_be_repeated(given: Any) -> None:
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Generator):
            raise CannotDeferError("it draws from a generator of its own")
        if isinstance(leaf, torch.UntypedStorage | torch.TypedStorage):
            raise CannotDeferError("it sets the memory of a tensor")


def _filled(function: Any, args: Any, kwargs: Any) -> int | None:
    """The storage that an operation writes over, if it does."""
    if function._schema.name.removeprefix("aten::") not in _FILLS or not isinstance(args[0], View):
        return None
    read = [leaf.storage for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, View)]
    return args[0].storage if args[0].is_all and args[0].storage not in read else None


def carry_out(operation: Operation, storages: dict[int, torch.UntypedStorage]) -> None:
    """The same with memory."""

    def real(value: Any) -> Any:
        if isinstance(value, View):
            if value.storage not in storages:  # it was let go of, because it is written over now
                storages[value.storage] = torch.UntypedStorage(value.num_bytes)  # type: ignore[no-untyped-call]
            return value.of(storages[value.storage])
        return value

    args, kwargs = tree_map(real, (operation.args, operation.kwargs), is_leaf=lambda leaf: isinstance(leaf, View))
    with _default_dtype(operation.default_dtype):
        found = tree_leaves(operation.function(*args, **kwargs))
    if operation.function is torch.ops.aten.lift_fresh.default:  # of a constant, which must stay what it is
        found = [tensor.clone() for tensor in found]
    for view, tensor in zip(operation.results, found, strict=True):
        if view is not None and view.storage not in storages:
            laid_out = tensor.dtype, tensor.stride(), tensor.storage_offset()
            expected = view.dtype, view.stride, view.offset
            assert laid_out == expected, f"{operation.function} gives {laid_out} on the CPU, and not {expected}"
            storages[view.storage] = tensor.untyped_storage()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    saved = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(saved)
