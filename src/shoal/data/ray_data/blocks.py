"""The actor that carries out a pipeline of Ray Data for all workers of a run."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from shoal.core.errors import UserError
from shoal.data.ray_data.rows import of_pipeline, pipeline_of
from shoal.data.ray_data.travel import Failed, Where

TOGETHER = 4
"""Requests that a worker asks for at once: asking takes longer than to say where rows are."""
_SKEW = 2 * TOGETHER
"""Steps by which a worker may be ahead of the slowest."""


class Span(NamedTuple):
    """Rows [begin, end) of one going through the pipeline of an epoch."""

    stream: tuple[int, int]
    """Which going through, and which epoch."""
    begin: int
    end: int


class Piece(NamedTuple):
    """Rows of a block."""

    block: Any
    start: int
    end: int


class Blocks:
    """An actor: carries out the pipeline, once for all workers, and says in which blocks the rows are.

    It holds references alone. A block is let go when no worker can ask for it any more; Ray Data goes on when there is
    room in the store. A worker that is far ahead of the slowest waits, so that few blocks are held.
    """

    def __init__(self, where: Where, what: list[Any], num_rows: int, workers: int, step: int, last_epoch: int) -> None:
        where.take_over()
        self._what = what
        self._num_rows = num_rows
        self._step = step
        self._last_epoch = last_epoch
        self._known = threading.Condition()
        self._pulling = threading.Lock()
        self._workers = workers
        self._marks: dict[int, Span] = {}
        """The first of what each worker asked for last."""
        self._held: deque[tuple[Span, Any, int]] = deque()
        """Rows, the block they are in, and where they begin in it."""
        self._pulled = Span((-1, -1), 0, 0)
        self._bundles: Iterator[Any] = iter(())
        self._failed: Failed | None = None
        """What every worker is told, once the pipeline has failed."""
        self._coming: tuple[tuple[int, int], Future[Iterator[Any]]] | None = None

    def take(self, worker: int, spans: list[Span]) -> Any:
        """Where the rows of each span are, in order. A worker that asks has read what it asked for before."""
        first, last = spans[0], spans[-1]
        with self._known:
            if not self._marks:  # the others begin in the same step
                begin = first._replace(begin=max(0, first.begin - self._step))
                self._marks = dict.fromkeys(range(self._workers), begin)
            # Stand-ins came before in the same step, and change nothing.
            self._marks[worker] = max(first, self._marks[worker])
            self._known.notify_all()
            self._known.wait_for(lambda: self._lead(last) <= _SKEW * self._step)
        with self._pulling:
            try:
                return self._failed or [self._pieces(span) for span in spans]
            except Exception as error:  # noqa: BLE001 - goes to the process that trains
                self._failed = Failed.of(of_pipeline(error))
                return self._failed

    def num_held(self) -> int:
        """Blocks that are kept for workers that have not come so far."""
        return len(self._held)

    def _lead(self, span: Span) -> int:
        """Rows between the slowest worker and the end of this span."""
        slowest = min(self._marks.values())
        if span.stream == slowest.stream:
            return span.end - slowest.begin
        return self._num_rows - slowest.begin + span.end

    def _let_go(self) -> None:
        slowest = min(self._marks.values())
        while self._held:
            held = self._held[0][0]
            if held.stream == slowest.stream and held.end > slowest.begin - self._step:
                return
            if held.stream > slowest.stream:
                return
            self._held.popleft()

    def _pull_until(self, span: Span) -> None:
        if self._pulled.stream < span.stream:
            if self._pulled.stream[0] == span.stream[0]:  # others still want the end of the epoch before
                self._pull_until(Span(self._pulled.stream, 0, self._num_rows))
            self._bundles = self._begin(span.stream)
            self._pulled = Span(span.stream, 0, 0)
        while self._pulled.stream == span.stream and self._pulled.end < span.end:
            self._pull()
        if self._pulled == Span(span.stream, self._num_rows, self._num_rows):
            return
        if self._pulled.stream == span.stream and self._pulled.end >= self._num_rows:
            self._finish()

    def _begin(self, stream: tuple[int, int]) -> Iterator[Any]:
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == stream:
            return coming[1].result()
        return self._started(stream)

    def _started(self, stream: tuple[int, int]) -> Iterator[Any]:
        import ray

        source = ray.get(self._what[0])
        bundles: Iterator[Any] = iter(pipeline_of(source, stream[1]).iter_internal_ref_bundles())
        return bundles

    def _pull(self) -> None:
        bundle = next(self._bundles, None)
        if bundle is None:
            raise self._other_number(f"{self._pulled.end:,}")
        slowest = min(self._marks.values())
        for entry, part in zip(bundle.blocks, bundle.slices, strict=True):
            start = part.start_offset if part is not None else 0
            count = part.num_rows if part is not None else _num_rows(entry)
            span = Span(self._pulled.stream, self._pulled.end, self._pulled.end + count)
            self._pulled = span
            if count and (span.stream != slowest.stream or span.end > slowest.begin - self._step):
                self._held.append((span, entry.ref, start))

    def _finish(self) -> None:
        """All rows of an epoch are here: make sure of it, and have the next one begin."""
        if self._pulled.end > self._num_rows or any(_num_rows(e) for bundle in self._bundles for e in bundle.blocks):
            raise self._other_number("more")
        stream = self._pulled.stream
        self._pulled = Span(stream, self._num_rows, self._num_rows)
        if stream[1] < self._last_epoch:
            following = (stream[0], stream[1] + 1)
            self._coming = (following, _in_thread(lambda: self._started(following)))

    def _other_number(self, found: str) -> UserError:
        return UserError(
            f"data: the pipeline of epoch {self._pulled.stream[1]} gave {found} rows and there should be "
            f"{self._num_rows:,}; every epoch needs the same number, whenever it is carried out"
        )

    def _pieces(self, span: Span) -> list[Piece]:
        self._let_go()
        self._pull_until(span)
        pieces = []
        for held, block, start in self._held:
            first, last = max(held.begin, span.begin), min(held.end, span.end)
            if held.stream == span.stream and first < last:
                pieces.append(Piece(block, start + first - held.begin, start + last - held.begin))
        assert sum(piece.end - piece.start for piece in pieces) == span.end - span.begin, (span, self._held)
        return pieces


def _num_rows(entry: Any) -> int:
    """Of a block."""
    if entry.metadata.num_rows is not None:
        return int(entry.metadata.num_rows)
    import ray
    from ray.data.block import BlockAccessor

    return BlockAccessor.for_block(ray.get(entry.ref)).num_rows()


def _in_thread(function: Callable[[], Any]) -> "Future[Any]":
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
