"""Noticing when a worker waits for others, whichever strategy makes it wait."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


@contextlib.contextmanager
def noticed(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call `begin` and `end` around every wait for a message of this thread's, or of those that go backward for it.

    On a host, every way to wait in Python ends in one of two functions of PyTorch's, and it has no hook there; so they
    are wrapped for as long as a run trains. Not seen here is what DistributedDataParallel waits for in C++, and what a
    stream of a GPU waits for by itself, as FSDP has it do.
    """
    owner = threading.get_ident()
    of_work: Any = dist.Work.wait
    of_tensor: Any = functional.wait_tensor

    def is_ours() -> bool:
        # Threads that Python has not started are PyTorch's own, which go backward; others save, load or serve.
        return threading.get_ident() == owner or isinstance(threading.current_thread(), threading._DummyThread)

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours():
            return of_work(work, *args, **kwargs)
        begin()
        try:
            return of_work(work, *args, **kwargs)
        finally:
            end()

    def wait_tensor(tensor: Any) -> Any:
        if torch.compiler.is_compiling() or not is_ours():
            return of_tensor(tensor)
        begin()
        try:
            return of_tensor(tensor)
        finally:
            end()

    setattr(dist.Work, "wait", wait)  # noqa: B010 - to mypy it is a method
    setattr(functional, "wait_tensor", wait_tensor)  # noqa: B010
    try:
        yield
    finally:
        setattr(dist.Work, "wait", of_work)  # noqa: B010
        setattr(functional, "wait_tensor", of_tensor)  # noqa: B010
