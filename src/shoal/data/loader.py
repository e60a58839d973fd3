"""From the order of samples to batches: read in line or ahead, moved to the device; started at any step at no cost."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch

from shoal.core.batch import MicroBatch, StepBatch
from shoal.data.dataset import transform_of
from shoal.data.device import DeviceFeed, Sent
from shoal.data.how_many import HowMany
from shoal.data.order import Order
from shoal.data.processes import InLine, Reader, open_reader
from shoal.data.ray_data import RayRows
from shoal.data.read import Answer, OnError, Reading
from shoal.data.requests import Request, evaluation_requests, step_requests
from shoal.data.shards.store import CachedStore, Follower
from shoal.data.shuffle import Windowed
from shoal.data.statistics import DataStatistics

Answered = list[tuple[Request, Answer]]
_EVALUATED_AHEAD = 16
"""Steps, or batches of an evaluation, whose files are fetched ahead where they come in no order."""
OpenReader = Callable[[Reading, int, bool], Reader]


@dataclass(frozen=True)
class Loading:
    """How batches are read; which samples they hold does not depend on it."""

    workers: int | Literal["auto"] = 0
    """Processes that read ahead; `auto` finds out how many are needed."""
    most_workers: int = 1
    """As many at most as `auto` may take."""
    pin_memory: bool = False
    on_error: OnError = "fail"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Move batches there ahead of time."""
    transform_on_device: bool = False
    """Have the transforms of whole batches computed there, rather than by whoever reads."""
    count: Callable[[Any], Any] | None = None
    """Counts the items of a batch, while it is still on the host."""
    open_reader: OpenReader = open_reader
    tell: Callable[[str], None] = lambda words: None
    """Shows what is waited for to whoever watches the run."""
    lap: Callable[[str], None] = lambda phase: None
    """Told what a step has waited for: `data`, then `h2d` for what was still on its way to the device."""
    statistics: DataStatistics = field(default_factory=DataStatistics)


def train_batches(
    dataset: Any,
    order: Order,
    start_step: int,
    num_steps: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    micro_batch: int,
    loading: Loading | None = None,
) -> Generator[StepBatch]:
    """This worker's share of steps `start_step` to `num_steps`; nothing before `start_step` is read."""
    loading = loading or Loading()

    def requests_from(step: int) -> Iterator[list[Request]]:
        return step_requests(order, step, num_steps, rank, world_size, micro_batch)

    answers = _Answers(Reading(dataset, order.seed, loading.on_error, _is_raw(dataset, loading)), loading)
    if order.windows is not None:
        files = files_ahead(order, start_step, num_steps, rank, world_size)
        a_window = order.windows.window // order.global_batch + 1
    else:  # any file at any time
        files = _files_of(dataset, requests_from(start_step), start_step)
        a_window = _EVALUATED_AHEAD
    with contextlib.closing(answers), _following(dataset, files, a_window, loading) as follower:
        steps = _on_device(answers.steps(requests_from, start_step), dataset, loading)
        for number, microbatches in enumerate(steps, start_step):
            follower.at(number)
            first, last = order.bounds(number)
            yield StepBatch(microbatches, last - first)


class Evaluation:
    """Goes through a dataset in its own order, as often as wanted; the processes that read stay in between."""

    def __init__(
        self,
        dataset: Any,
        *,
        rank: int = 0,
        world_size: int = 1,
        batch: int,
        seed: int = 0,
        loading: Loading | None = None,
    ) -> None:
        self.dataset = dataset
        self.loading = loading or Loading()
        self._requests = _evaluation_requests(dataset, rank, world_size, batch)
        is_raw = _is_raw(dataset, self.loading)
        reading = Reading(dataset, seed, self.loading.on_error, is_raw, is_evaluation=True)
        self._answers = _Answers(reading, self.loading)

    def batches(self) -> Generator[MicroBatch]:
        """This worker's share, every sample exactly once over all workers.

        Every worker gets the same number of batches; where one has `num_samples` 0, it only stands in.
        """
        files = _files_of(self.dataset, ([request] for request in self._requests), 0)
        with _following(self.dataset, files, _EVALUATED_AHEAD, self.loading) as follower:
            answered = self._answers.steps(lambda first: ([request] for request in self._requests[first:]), 0)
            for number, microbatches in enumerate(_on_device(answered, self.dataset, self.loading)):
                follower.at(number)
                yield from microbatches

    def close(self) -> None:
        """End the processes that read."""
        self._answers.close()


def _evaluation_requests(dataset: Any, rank: int, world_size: int, batch: int) -> list[Request]:
    """Shares of the whole; of rows that come one after the other, a share of every so many."""
    if not isinstance(dataset, RayRows):
        return evaluation_requests(len(dataset), rank, world_size, batch)
    order = Order(len(dataset), world_size * batch, 0, is_shuffled=False)
    steps = step_requests(order, 0, order.steps_per_epoch, rank, world_size, batch)
    return list(chain.from_iterable(steps))


def evaluation_batches(dataset: Any, **settings: Any) -> Generator[MicroBatch]:
    """One pass of `Evaluation`."""
    evaluation = Evaluation(dataset, **settings)
    with contextlib.closing(evaluation):
        yield from evaluation.batches()


class _Answers:
    """Has requests answered, by another number of processes where that is found to be better."""

    def __init__(self, reading: Reading, loading: Loading) -> None:
        self.reading = reading
        self.loading = loading
        self._how_many = HowMany(loading.most_workers) if loading.workers == "auto" else None
        self._reader: Reader | None = None
        """Opened when it is first needed: validation may come late, or never."""

    def _open(self, count: int) -> Reader:
        self.loading.statistics.workers = count
        return self.loading.open_reader(self.reading, count, self.loading.pin_memory)

    def steps(
        self, requests_from: Callable[[int], Iterator[list[Request]]], start: int
    ) -> Generator[list[tuple[Request, Answer]]]:
        """The answers to the lists of requests from number `start` on."""
        if self._reader is None:
            self._reader = self._open(self.loading.workers if isinstance(self.loading.workers, int) else 0)
        answer = self._answering(requests_from, start)
        for number, requests in enumerate(requests_from(start), start):
            began = time.perf_counter()
            answered = [(request, answer(request)) for request in requests]
            read_s = time.perf_counter() - began
            for _, found in answered:
                if found.bad:
                    self.loading.statistics.skip(found.bad)
            if self._how_many is None:
                yield answered
                continue
            began = time.perf_counter()
            yield answered
            if (count := self._how_many.note(read_s, time.perf_counter() - began)) is not None:
                self._reader.close()
                self._reader = self._open(count)
                answer = self._answering(requests_from, number + 1)

    def _answering(
        self, requests_from: Callable[[int], Iterator[list[Request]]], start: int
    ) -> Callable[[Request], Answer]:
        if isinstance(self._reader, InLine):
            return self._reader.answer
        assert self._reader is not None
        # A reader runs ahead of the loop, so it has an iterator of its own over the same requests.
        answers = self._reader.answers(chain.from_iterable(requests_from(start)))
        return lambda request: next(answers)

    def close(self) -> None:
        """End what reads."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _on_device(answered: Iterator[Answered], dataset: Any, loading: Loading) -> Iterator[list[MicroBatch]]:
    """Micro-batches, moved to the device where one is given: a step ahead, so that copying and computing overlap."""
    transform = transform_of(dataset) if _is_raw(dataset, loading) else None
    if loading.device.type == "cpu" and transform is None and loading.count is None:
        for step in answered:
            yield [MicroBatch(answer.batch, answer.num_samples) for _, answer in step]
        return
    feed = DeviceFeed(loading.device, transform)
    if loading.device.type == "cpu":  # nothing to wait for
        for step in answered:
            yield [
                _micro_batch(feed.send(answer.batch, answer.indices, request.epoch).batch, answer, loading)
                for request, answer in step
            ]
        return
    waiting = None
    for step in answered:
        sent = []
        for request, answer in step:
            micro = _micro_batch(None, answer, loading)
            sent.append((micro, feed.send(answer.batch, answer.indices, request.epoch)))
        if waiting is not None:
            yield _received(feed, waiting, loading)
        waiting = sent
    if waiting is not None:
        yield _received(feed, waiting, loading)


def _is_raw(dataset: Any, loading: Loading) -> bool:
    return loading.transform_on_device and transform_of(dataset) is not None


def _micro_batch(data: Any, answer: Answer, loading: Loading) -> MicroBatch:
    count = int(loading.count(answer.batch)) if loading.count is not None and answer.num_samples else None
    return MicroBatch(data, answer.num_samples, count)


def _received(feed: DeviceFeed, waiting: list[tuple[MicroBatch, Sent]], loading: Loading) -> list[MicroBatch]:
    loading.lap("data")
    for micro, sent in waiting:
        micro.data = feed.receive(sent)
    loading.lap("h2d")
    return [micro for micro, _ in waiting]


def files_ahead(
    order: Order, start_step: int, num_steps: int, rank: int, world_size: int
) -> Iterator[tuple[int, list[int]]]:
    """The files that a worker needs from a step on, each time with the first step that does, in the order of
    need."""
    assert order.windows is not None
    first_slot, last_slot = (-(-order.global_batch * number // world_size) for number in (rank, rank + 1))
    step = start_step
    while step < num_steps:
        epoch = order.epoch_of(step)
        first = epoch * order.steps_per_epoch
        in_epoch = order.in_epoch(epoch)
        assert isinstance(in_epoch, Windowed)
        for needed, files in in_epoch.files_from(step - first, first_slot, last_slot):
            yield first + needed, files
        step = first + order.steps_per_epoch


def _files_of(dataset: Any, steps: Iterator[list[Request]], first: int) -> Iterator[tuple[int, list[int]]]:
    """The same from the requests themselves."""
    starts = getattr(dataset, "starts", None)
    if starts is not None:
        for number, requests in enumerate(steps, first):
            indices = np.concatenate([request.indices for request in requests])
            yield number, np.unique(np.searchsorted(starts, indices, side="right") - 1).tolist()


class _Nowhere:
    """Follows nothing: samples are at hand."""

    def at(self, step: int) -> None:
        """Nothing."""


def _following(
    dataset: Any, files: Iterator[tuple[int, list[int]]], steps_ahead: int, loading: Loading
) -> contextlib.AbstractContextManager[_Nowhere | Follower]:
    """Has files fetched before they are needed, where they are in an object store."""
    store = getattr(dataset, "store", None)
    if not isinstance(store, CachedStore):
        return contextlib.nullcontext(_Nowhere())
    return store.following(files, steps_ahead, loading.statistics, loading.tell)
