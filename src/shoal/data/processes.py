"""Reading in line, or ahead by processes beside the training process, which stay for as long as they are needed."""

import atexit
import gc
import os
import signal
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils import signal_handling

from shoal.core.errors import UserError
from shoal.core.memory import keep_freed_memory
from shoal.core.sessions import end_with_parent
from shoal.data.read import Answer, Reading
from shoal.data.requests import Request


class Reader(Protocol):
    """Answers requests in their order."""

    def answers(self, requests: Iterator[Request]) -> Iterator[Answer]:
        """An answer a request. A reader may ask for requests ahead of the answers that are taken."""
        ...

    def close(self) -> None:
        """End what reads."""
        ...


class InLine:
    """Reads when it is asked, in the process that asks."""

    def __init__(self, reading: Reading, pin_memory: bool) -> None:
        self.reading = reading
        self.pin_memory = pin_memory

    def answers(self, requests: Iterator[Request]) -> Iterator[Answer]:
        """One at a time."""
        return map(self.answer, requests)

    def answer(self, request: Request) -> Answer:
        """At once."""
        answer = self.reading.answer(request)
        return pinned(answer) if self.pin_memory else answer

    def close(self) -> None:
        """Nothing to end."""


class Processes:
    """Reads ahead by processes, each a whole micro-batch at a time."""

    def __init__(self, reading: Reading, count: int, pin_memory: bool) -> None:
        assert count > 0
        self._sampler = _RequestSampler()
        self._loader = DataLoader(
            _RequestReader(reading),
            sampler=self._sampler,
            batch_size=None,
            num_workers=count,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            persistent_workers=True,
            worker_init_fn=_prepare_worker,
            # A generator of its own: DataLoader would otherwise draw from the one that dropout draws from.
            generator=torch.Generator().manual_seed(0),
        )
        self._iterator: Any = None

    def answers(self, requests: Iterator[Request]) -> Iterator[Answer]:
        """As DataLoader hands them out; the processes are started by the first call, and stay."""
        self._sampler.requests = requests
        is_first = self._iterator is None
        self._iterator = iter(self._loader)
        if is_first:
            _end_with_program(self)
        for answer in self._iterator:
            if isinstance(answer, UserError):
                raise answer
            yield Answer(*answer)

    def close(self) -> None:
        """At once, not when the last reference goes: a traceback would keep the processes until this one ends."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()
            self._iterator = self._loader._iterator = None

    def kill(self) -> None:
        """Whatever they are doing: nobody needs it any more."""
        if self._iterator is not None:
            # First, or DataLoader takes their end for a failure.
            signal_handling._remove_worker_pids(id(self._iterator))  # type: ignore[attr-defined]
            self._iterator._worker_pids_set = False
            for worker in self._iterator._workers:
                worker.kill()
            self.close()


def _end_with_program(reader: Processes) -> None:
    """Have its processes end with this one, at once, where nobody has closed it.

    DataLoader's own way out waits for each of them, and by a first signal they do not end.
    """
    found, owner = weakref.ref(reader), os.getpid()

    def end() -> None:
        still = found()
        if still is not None and os.getpid() == owner:  # not a process that was forked: the reader is not its own
            still.kill()

    atexit.register(end)
    weakref.finalize(reader, atexit.unregister, end).atexit = False


def open_reader(reading: Reading, count: int, pin_memory: bool) -> Reader:
    """So many processes; none reads in line."""
    return Processes(reading, count, pin_memory) if count else InLine(reading, pin_memory)


class _RequestReader(Dataset[Any]):
    """Runs in a loader process: answers a request."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def __getitem__(self, request: Request) -> Any:
        return self.reading(request)


class _RequestSampler(Sampler[Request]):
    """Hands DataLoader the requests in order."""

    def __init__(self) -> None:
        self.requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


def _unchanged(batch: Any) -> Any:
    return batch


def _prepare_worker(worker_id: int) -> None:
    """Keep a worker alive through the signals that the trainer handles: it still needs the batches in flight.

    A Ctrl-C does not reach it, because it leaves the trainer's process group. A SIGTERM to every process of a job
    (Slurm, systemd) gives it a minute, the second one none. The trainer ends it when it is done, and a worker whose
    trainer is gone ends by itself.
    """
    received = 0

    def on_terminate(signum: int, frame: Any) -> None:
        nonlocal received
        received += 1
        if received > 1:
            os._exit(128 + signum)
        signal.alarm(60)

    os.setpgid(0, 0)
    end_with_parent()
    keep_freed_memory()
    gc.freeze()  # what the trainer had is no garbage here, and looking through it would copy its memory page by page
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_terminate)


def pinned(answer: Answer) -> Answer:
    """The same with its tensors in memory that a GPU copies from by itself."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return answer._replace(batch=pin_memory(answer.batch))  # type: ignore[no-untyped-call]
