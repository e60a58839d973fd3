"""Memory for large tensors that come and go: what one has let go of, the next one gets.

A large piece of memory that is asked for anew is handed out page by page as it is first written to, and given back when
it is let go of. For a batch of images that costs more than filling it.
"""

import math
import os
import threading
import weakref

import numpy as np
import torch

_LEAST_BYTES = 1 << 20
"""Smaller ones are the allocator's business, which keeps them by itself."""
_KEPT = 4
"""Pieces of one size that are kept while nobody has them."""
_KEPT_BYTES = 512 << 20
"""And of all sizes; what was kept longest goes first."""


class Recycled:
    """Hands out tensors, and takes their memory back when nobody has them any more; safe with threads and forks."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._free: dict[int, list[np.ndarray]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU whose values are whatever was there."""
        size = math.prod(shape) * dtype.itemsize
        if size < _LEAST_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self._process != os.getpid():  # a fork copies a lock as it is, also one that another thread has just taken
            self._begin()
        with self._lock:
            kept = self._free.setdefault(size, [])
            memory = kept.pop() if kept else _allocate(size)
        # The tensor, and all that is made of it, holds on to this view of the memory, and to nothing else.
        view = memory[:]
        weakref.finalize(view, self._take_back, memory).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def _take_back(self, memory: np.ndarray) -> None:
        # Without waiting: this may be called in the midst of `empty`, by the collector of garbage.
        if self._process == os.getpid() and self._lock.acquire(blocking=False):
            try:
                kept = self._free.pop(len(memory), [])
                self._free[len(memory)] = [*kept[: _KEPT - 1], memory]  # the size that was used last comes last
                while len(self._free) > 1 and sum(size * len(p) for size, p in self._free.items()) > _KEPT_BYTES:
                    del self._free[next(iter(self._free))]
            finally:
                self._lock.release()


def _allocate(size: int) -> np.ndarray:
    """Not numpy's own memory, for which it asks for huge pages: a machine that must first find some takes many times as
    long. As a storage, which torch does not fill where it is to be deterministic."""
    storage = torch.UntypedStorage(size, device="cpu")  # type: ignore[no-untyped-call]
    memory: np.ndarray = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return memory


RECYCLED = Recycled()
"""For the whole process."""
