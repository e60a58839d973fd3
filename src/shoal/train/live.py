"""How much memory tensors take while something runs: storages are counted when they appear and when they go."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.parallel.sizes import LOSS, Phase

Workspace = Callable[[Any, tuple[Any, ...], Any], int]
"""(operation, arguments, result) -> bytes that its kernel takes for as long as it runs."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations bring forth, phase by phase; works on real and on fake tensors alike."""

    def __init__(self, given: Iterable[torch.Tensor], workspace: Workspace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases: list[Phase] = []
        self._workspace = workspace
        self._live = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._uncounted: set[int] = set()
        self._gradients: dict[int, tuple[int, int]] = {}
        """Storages of this phase's gradients: piece and bytes."""
        for tensor in given:
            self._take_note(tensor, counts=False)
        self._begin(LOSS, is_backward=False)

    def _begin(self, piece: int, is_backward: bool) -> None:
        self._piece, self._is_backward, self._operations = piece, is_backward, 0
        self._gradients = {}
        self._gradient_bytes = 0
        self._peak, self._peak_gradients, self._peak_apart = self._live, 0, self._live

    def enter(self, piece: int, is_backward: bool) -> None:
        """From here on it is this piece that computes."""
        if (piece, is_backward) != (self._piece, self._is_backward):
            self.finish()
            self._begin(piece, is_backward)

    def finish(self) -> None:
        """The phase is over: its gradients are no longer counted."""
        for key, (_, size) in self._gradients.items():
            self._uncounted.add(key)
            self._live -= size
        if self._operations:
            self.phases.append(
                Phase(
                    self._piece,
                    self._is_backward,
                    self._peak,
                    self._peak_gradients,
                    self._peak_apart,
                    self._live,
                    tuple(self._gradients.values()),
                )
            )

    def note_gradient(self, tensor: torch.Tensor, piece: int) -> None:
        """This tensor has become the gradient of a weight of that piece, or has been added to it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._uncounted and key not in self._gradients:
            self._gradients[key] = (piece, storage.nbytes())
            self._gradient_bytes += storage.nbytes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and see what it brought forth."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._take_note(tensor)
        self._operations += 1
        here = self._live + self._workspace(func, args, result)
        if here > self._peak:
            self._peak, self._peak_gradients = here, self._gradient_bytes
        self._peak_apart = max(self._peak_apart, here - self._gradient_bytes)
        return result

    def _take_note(self, tensor: torch.Tensor, counts: bool = True) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            if key in self._uncounted:
                self._uncounted.remove(key)
            else:
                self._live -= size
                if key in self._gradients:
                    self._gradient_bytes -= self._gradients.pop(key)[1]

        self._known[key] = weakref.ref(storage, gone)
        if counts:
            self._live += size
        else:
            self._uncounted.add(key)
