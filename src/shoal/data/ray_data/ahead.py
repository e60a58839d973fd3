"""Fetching batches in a thread of the process that trains, a few ahead."""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

_READY = 2
"""Batches that lie ready in the process that trains."""
_LOOK_EVERY_S = 0.5


class StoppedError(Exception):
    """Nobody waits for more."""


class Ahead:
    """Makes what an iterator gives in a thread, so many ahead: what comes from elsewhere is fetched meanwhile."""

    def __init__(self, make: Callable[[threading.Event], Iterator[Any]]) -> None:
        self._stop = threading.Event()
        self._made: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(_READY)
        self._end: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(make,), name="ray data", daemon=True)
        self._thread.start()

    def next(self) -> Any:
        """The next; the exception that ended it, or StopIteration, for ever after the last."""
        if self._end is None:
            made, self._end = self._made.get()
            if self._end is None:
                return made
        raise self._end

    def close(self) -> None:
        """Whatever it does."""
        self._stop.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._made.get_nowait()  # it may wait for room
            self._thread.join(0.02)

    def _run(self, make: Callable[[threading.Event], Iterator[Any]]) -> None:
        try:
            for made in make(self._stop):
                self._put(made, None)
            self._put(None, StopIteration())
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            with contextlib.suppress(StoppedError):
                self._put(None, error)

    def _put(self, made: Any, error: BaseException | None) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                return self._made.put((made, error), timeout=_LOOK_EVERY_S)
        raise StoppedError


def wait(ray: Any, reference: Any, stop: threading.Event) -> None:
    """Until what a reference stands for is there."""
    while not ray.wait([reference], timeout=_LOOK_EVERY_S)[0]:
        if stop.is_set():
            raise StoppedError


def taken(ahead: Ahead) -> Generator[Any]:
    """What is made ahead, until the end of it or of whoever asks."""
    try:
        while True:
            try:
                made = ahead.next()
            except StopIteration:
                return
            yield made
    finally:
        ahead.close()
