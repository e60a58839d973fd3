"""Reading a dataset that has items, by actors anywhere on the cluster."""

import contextlib
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shoal.core.errors import RunError, UserError
from shoal.data.ray_data.ahead import Ahead, StoppedError, taken, wait
from shoal.data.ray_data.connect import GROWS_WITHIN_S, ROOM_WITHIN_S, connected, grows, no_room
from shoal.data.ray_data.travel import Failed, Where, last_line, packed, unpacked

_LOOK_EVERY_S = 0.5
_TRIES = 4
"""Readers that may be lost over one request, until it is taken for the cause."""


class _Reader:
    """An actor: holds the dataset and answers requests."""

    def __init__(self, where: Where, what: list[Any], threads: int) -> None:
        torch.set_num_threads(threads)
        self._where = where
        self._what = what
        self._loaded: tuple[Any, Callable[[Any, Any], Any]] | None = None

    def is_ready(self) -> bool:
        """Answered when the process is there."""
        return True

    def read(self, request: Any) -> Any:
        """The answer, packed."""
        try:
            if self._loaded is None:
                self._loaded = self._load()
            dataset, read = self._loaded
            return packed(read(dataset, request))
        except Exception as error:  # noqa: BLE001 - goes to the process that trains
            return Failed.of(error)

    def _load(self) -> tuple[Any, Callable[[Any, Any], Any]]:
        """Not before the first request: it may take a while, which must not look like a cluster without room."""
        import ray

        self._where.take_over()  # before the user's classes are looked for
        loaded: tuple[Any, Callable[[Any, Any], Any]] = ray.get(self._what[0])
        return loaded


@dataclass(eq=False)
class _Place:
    """A reader as its worker sees it."""

    actor: Any
    ready: Any
    is_ready: bool = False
    asked: list[Any] = field(default_factory=list)
    """What it has not answered yet, for all we know."""


class _Asked(NamedTuple):
    request: Any
    place: _Place
    reference: Any
    tries: int


class RayReaders:
    """Readers of one worker on a Ray cluster; they stay until they are closed.

    Where a process or a machine with a reader is lost, another takes its place and its requests, as often as need be;
    only a request that ends four readers one after the other ends the run.
    """

    def __init__(
        self,
        dataset: Any,
        read: Callable[[Any, Any], Any],
        *,
        count: int = 2,
        cpus: float = 1.0,
        ahead: int | None = None,
        address: str | None = None,
    ) -> None:
        """`read(dataset, request)` answers a request, in `count` actors of `cpus` CPUs each, all of them pickled.

        `ahead` requests are with the readers at most, two for each if it is not said; as many answers, and two more,
        are in memory at most.
        """
        assert count > 0
        self._cpus = cpus
        self._most_ahead = ahead or 2 * count
        self._stack = contextlib.ExitStack()
        self._ray = self._stack.enter_context(connected(address))
        self._ahead: Ahead | None = None
        self._places: list[_Place] = []
        self._trouble = ""
        try:
            # A reference in a list is not looked up by Ray: the reader does it when it can find the user's classes.
            self._what = [self._ray.put((dataset, read))]
            self._where = Where.here()
            self._places = [self._new_place() for _ in range(count)]
        except BaseException as error:
            self.close()
            if isinstance(error, (TypeError, AttributeError, pickle.PicklingError)):
                raise UserError(
                    f"data.loader: ray sends the dataset to other processes, and {type(dataset).__name__} cannot be "
                    f"pickled: {last_line(error)}; open files and connections when the first sample is read"
                ) from error
            raise

    def answers(self, requests: Iterator[Any]) -> Generator[Any]:
        """An answer a request, in their order. The next call ends what is left of this one."""
        self._end_answers()
        self._ahead = Ahead(lambda stop: self._answers(requests, stop))
        return taken(self._ahead)

    def close(self) -> None:
        """End the readers."""
        self._end_answers()
        places, self._places = self._places, []
        for place in places:
            self._kill(place)
        self._stack.close()

    def _end_answers(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _kill(self, place: _Place) -> None:
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, ValueError):
            self._ray.kill(place.actor)

    def _new_place(self) -> _Place:
        remote = self._ray.remote(_Reader).options(
            num_cpus=self._cpus,
            max_restarts=0,  # the place is given to another, which may be elsewhere
            scheduling_strategy="SPREAD",
        )
        actor = remote.remote(self._where, self._what, max(1, int(self._cpus)))
        return _Place(actor, actor.is_ready.remote())

    def _replace(self, place: _Place) -> None:
        if place in self._places:  # else an earlier request of the same reader has told
            self._kill(place)
            self._places[self._places.index(place)] = self._new_place()

    def _answers(self, requests: Iterator[Any], stop: threading.Event) -> Iterator[Any]:
        window: deque[_Asked] = deque()
        for request in requests:
            window.append(self._send(request, stop))
            if len(window) >= self._most_ahead:
                yield self._receive(window.popleft(), stop)
        while window:
            yield self._receive(window.popleft(), stop)

    def _send(self, request: Any, stop: threading.Event, tries: int = 1) -> _Asked:
        place = self._least_busy(stop)
        reference = place.actor.read.remote(request)
        place.asked.append(reference)
        return _Asked(request, place, reference, tries)

    def _receive(self, asked: _Asked, stop: threading.Event) -> Any:
        from ray.exceptions import RayError, RayTaskError

        while True:
            wait(self._ray, asked.reference, stop)
            try:
                answer = self._ray.get(asked.reference)
            except RayTaskError as error:
                raise UserError(f"data: what was read cannot be sent to another process: {last_line(error)}") from error
            except RayError as error:  # the process is gone, or its machine
                self._trouble = last_line(error)
                self._replace(asked.place)
                if asked.tries == _TRIES:
                    raise RunError(
                        f"data: {_TRIES} processes have ended one after the other while they read the same samples "
                        f"({_which(asked.request)}): {self._trouble}"
                    ) from error
                asked = self._send(asked.request, stop, asked.tries + 1)
                continue
            if isinstance(answer, Failed):
                raise answer.error
            if isinstance(answer, UserError):
                raise answer
            return unpacked(answer)

    def _least_busy(self, stop: threading.Event) -> _Place:
        """Of those that run: one that waits for room does not hold up the others, and a slow one gets less."""
        self._look(0.0)
        began, most_s = time.monotonic(), None
        while not any(place.is_ready for place in self._places):
            self._look(_LOOK_EVERY_S)
            if stop.is_set():
                raise StoppedError
            if most_s is None:
                most_s = GROWS_WITHIN_S if grows(self._ray) else ROOM_WITHIN_S
            waited_s = time.monotonic() - began
            if waited_s > most_s and (waited_s > GROWS_WITHIN_S or not self._has_room()):
                raise no_room(self._ray, self._cpus, self._trouble)
        asked = [reference for place in self._places for reference in place.asked]
        if asked:
            done = set(self._ray.wait(asked, num_returns=len(asked), timeout=0, fetch_local=False)[0])
            for place in self._places:
                place.asked = [reference for reference in place.asked if reference not in done]
        return min((place for place in self._places if place.is_ready), key=lambda place: len(place.asked))

    def _has_room(self) -> bool:
        """Whether it is not for want of CPUs that no reader is there: on a busy machine they take long to start."""
        return bool(self._ray.available_resources().get("CPU", 0.0) >= self._cpus)

    def _look(self, timeout_s: float) -> None:
        """See which have come up meanwhile."""
        from ray.exceptions import RayError

        coming = [place for place in self._places if not place.is_ready]
        if not coming:
            return
        ready, _ = self._ray.wait([place.ready for place in coming], timeout=timeout_s, num_returns=1)
        for place in [place for place in coming if place.ready in ready]:
            try:
                place.is_ready = self._ray.get(place.ready)
            except RayError as error:
                self._trouble = last_line(error)
                self._replace(place)


def _which(request: Any) -> str:
    indices = getattr(request, "indices", None)
    return str(request) if indices is None else f"{', '.join(map(str, indices[:8]))}{', ...' * (len(indices) > 8)}"
