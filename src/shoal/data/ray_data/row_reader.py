"""One worker's part of a pipeline of Ray Data."""

import contextlib
import itertools
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from shoal.core.errors import RunError
from shoal.data.ray_data.ahead import Ahead, taken, wait
from shoal.data.ray_data.blocks import TOGETHER, Blocks, Piece, Span
from shoal.data.ray_data.connect import GROWS_WITHIN_S, NAMESPACE, await_room, connected
from shoal.data.ray_data.rows import RayRows
from shoal.data.ray_data.travel import Failed, Where, last_line
from shoal.data.read import Answer
from shoal.data.requests import Request


class RowReader:
    """One worker's part of a pipeline of rows; all workers make theirs together.

    Requests hold row numbers within their epoch, one after the other, and come from steps in which all workers take
    part: `step_requests` with an `Order` that does not shuffle, for evaluation too.
    """

    def __init__(
        self,
        rows: RayRows,
        *,
        name: str,
        worker: int = 0,
        workers: int = 1,
        step: int,
        last_epoch: int = 0,
        pin_memory: bool = False,
        address: str | None = None,
    ) -> None:
        """`name`: the same for all workers, and used by nobody else, before or after. `worker`: which of the processes
        this is; several may read the same rows. `step`: rows of a step, over all workers. The epoch after one that is
        over is begun ahead, unless that was `last_epoch`."""
        self._rows = rows
        self._worker = worker
        self._workers = workers
        self._pin_memory = pin_memory
        self._passes = 0
        self._ahead: Ahead | None = None
        self._stack = contextlib.ExitStack()
        self._ray = self._stack.enter_context(connected(address))
        try:
            # The first worker's, so that it ends with the run, whichever way that ends.
            self._blocks = self._start(name, step, last_epoch) if worker == 0 else self._find(name)
        except BaseException:
            self._stack.close()
            raise

    def answers(self, requests: Iterator[Request]) -> Generator[Answer]:
        """An answer a request, in their order. The next call goes through the pipeline once more."""
        self._end_answers()
        self._passes += 1
        number = self._passes
        self._ahead = Ahead(lambda stop: self._answers(requests, number, stop))
        return taken(self._ahead)

    def close(self) -> None:
        """Let go; what the first worker let go of, ends. So all must have read what they want to read."""
        self._end_answers()
        if self._worker == 0:
            from ray.exceptions import RayError

            with contextlib.suppress(RayError, ValueError):
                self._ray.kill(self._blocks)
        self._stack.close()

    def _end_answers(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _start(self, name: str, step: int, last_epoch: int) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        await_room(self._ray)
        here = self._ray.get_runtime_context().get_node_id()
        remote = self._ray.remote(Blocks).options(
            name=name,
            namespace=NAMESPACE,
            num_cpus=0,
            max_concurrency=self._workers + 1,
            # Where the machine of the first worker is lost, so is the run: no other needs to be there for it.
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
        )
        what = [self._ray.put(self._rows.source)]
        self._kept = what  # as long as the actor may ask for it
        return remote.remote(Where.here(), what, len(self._rows), self._workers, step, last_epoch)

    def _find(self, name: str) -> Any:
        deadline = time.monotonic() + GROWS_WITHIN_S
        while True:
            try:
                return self._ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                if time.monotonic() > deadline:
                    raise RunError("data: the first worker does not start the pipeline") from None
                time.sleep(0.1)

    def _answers(self, requests: Iterator[Request], number: int, stop: threading.Event) -> Iterator[Answer]:
        from ray.exceptions import RayError

        while some := list(itertools.islice(requests, TOGETHER)):
            reference = self._blocks.take.remote(self._worker, [_span(number, request) for request in some])
            wait(self._ray, reference, stop)
            try:
                found = self._ray.get(reference)
                if isinstance(found, Failed):
                    raise found.error
                for request, pieces in zip(some, found, strict=True):
                    batch = self._rows.batch_of([self._columns(piece) for piece in pieces])
                    batch = _pinned(batch) if self._pin_memory else batch
                    yield Answer(batch=batch, indices=request.indices, num_samples=request.num_samples, bad=[])
            except RayError as error:
                raise RunError(f"data: the pipeline of Ray Data is gone: {last_line(error)}") from error

    def _columns(self, piece: Piece) -> dict[str, np.ndarray]:
        from ray.data.block import BlockAccessor

        block = BlockAccessor.for_block(self._ray.get(piece.block))
        part = BlockAccessor.for_block(block.slice(piece.start, piece.end, copy=False)).to_numpy()
        return part if isinstance(part, dict) else {"item": part}


def _span(number: int, request: Request) -> Span:
    begin, end = int(request.indices[0]), int(request.indices[-1]) + 1
    assert end - begin == len(request.indices), "rows one after the other"
    return Span((number, request.epoch), begin, end)


def _pinned(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]
