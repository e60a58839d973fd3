"""From the order of samples to batches: read in line, or ahead by worker processes; started at any step at no cost."""

import contextlib
import os
import signal
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.errors import UserError
from shoal.core.rng import derive_seed, isolated_rng, seed_host
from shoal.data.dataset import reads_batches
from shoal.data.order import Order, worker_slices


class _Request(NamedTuple):
    """One micro-batch to read."""

    epoch: int
    indices: np.ndarray
    num_samples: int
    """Those that count: none where the indices are stand-ins."""


_STAND_INS = 2
"""Samples that stand in for an empty micro-batch; batch norm cannot train on one alone."""


def _request(epoch: int, indices: np.ndarray, start: int, end: int, first: int) -> _Request:
    """Positions [start, end) of `indices`; where there are none, the first ones of the step stand in for them.

    Collectives need every worker to compute as often as the others, so an empty micro-batch is computed too, and
    counts for nothing.
    """
    if end > start:
        return _Request(epoch, indices[start:end], end - start)
    return _Request(epoch, indices[first : first + _STAND_INS], 0)


def read_items(dataset: Any, epoch: int, indices: np.ndarray, seed: int) -> Any:
    """One micro-batch, item by item.

    Each item is read, and all are put together, under a seed of their own, (seed, epoch, sample), so that random
    transforms in a user's dataset give the same whoever reads it and after any resume.
    """
    collate = getattr(dataset, "collate", default_collate)
    items = []
    with isolated_rng(seed):
        for index in indices.tolist():
            seed_host(derive_seed(seed, epoch, index))
            items.append(dataset[index])
        return collate(items)


def train_batches(
    dataset: Any,
    order: Order,
    start_step: int,
    num_steps: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    micro_batch: int,
    workers: int = 0,
    pin_memory: bool = False,
) -> Generator[StepBatch]:
    """This worker's share of steps `start_step` to `num_steps`; nothing before `start_step` is read."""
    steps = partial(_step_requests, order, start_step, num_steps, rank, world_size, micro_batch)
    # Worker processes run ahead of the loop, so they are fed by an iterator of their own over the same requests.
    ahead = (request for step in steps() for request in step)
    with _reader(dataset, ahead, order.seed, workers, pin_memory) as read:
        for number, requests in enumerate(steps(), start_step):
            first, last = order.bounds(number)
            microbatches = [MicroBatch(read(request), request.num_samples) for request in requests]
            yield StepBatch(microbatches, last - first)


def evaluation_batches(
    dataset: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    batch: int,
    seed: int = 0,
    workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[MicroBatch]:
    """This worker's share of a dataset in its own order, every sample exactly once over all workers.

    Every worker gets the same number of batches; where one has `num_samples` 0, it only stands in.
    """
    slices = worker_slices(0, len(dataset), rank, world_size, batch)
    indices = np.arange(len(dataset))
    requests = [_request(0, indices, start, end, 0) for start, end in slices]
    with _reader(dataset, iter(requests), seed, workers, pin_memory) as read:
        for request in requests:
            yield MicroBatch(read(request), request.num_samples)


def _step_requests(
    order: Order, start_step: int, num_steps: int, rank: int, world_size: int, micro_batch: int
) -> Iterator[list[_Request]]:
    epoch, permutation = -1, np.empty(0, dtype=np.int64)
    for step in range(start_step, num_steps):
        if order.epoch_of(step) != epoch:
            epoch = order.epoch_of(step)
            permutation = order.permutation(epoch)
        first, last = order.bounds(step)
        slices = worker_slices(first, last, rank, world_size, micro_batch)
        yield [_request(epoch, permutation, start, end, first) for start, end in slices]


@contextlib.contextmanager
def _reader(
    dataset: Any, requests: Iterator[_Request], seed: int, workers: int, pin_memory: bool
) -> Iterator[Callable[[_Request], Any]]:
    """A function that answers the requests, in their order: in line, or by worker processes that read ahead."""
    if not workers:
        whole = reads_batches(dataset)

        def read_here(request: _Request) -> Any:
            if whole:
                batch = dataset.batch(request.indices, request.epoch)
            else:
                batch = read_items(dataset, request.epoch, request.indices, seed)
            return _pin(batch) if pin_memory else batch

        yield read_here
        return

    loader = DataLoader(
        _RequestReader(dataset, seed),
        sampler=_RequestSampler(requests),
        batch_size=None,
        num_workers=workers,
        collate_fn=_unchanged,
        pin_memory=pin_memory,
        worker_init_fn=_prepare_worker,
        # A generator of its own: DataLoader would otherwise draw from the one that dropout draws from.
        generator=torch.Generator().manual_seed(0),
    )
    batches = iter(loader)

    def read_ahead(request: _Request) -> Any:
        batch = next(batches)
        if isinstance(batch, UserError):
            raise batch
        return batch

    try:
        yield read_ahead
    finally:
        # At once, not when the last reference goes: a traceback would keep the workers until the process ends.
        batches._shutdown_workers()  # type: ignore[attr-defined]


class _RequestReader(Dataset[Any]):
    """Runs in a loader worker: answers a request with a batch."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.whole = reads_batches(dataset)

    def __getitem__(self, request: _Request) -> Any:
        try:
            if self.whole:
                return self.dataset.batch(request.indices, request.epoch)
            return read_items(self.dataset, request.epoch, request.indices, self.seed)
        except UserError as error:
            return error  # as a value: DataLoader would bury the message in a traceback


class _RequestSampler(Sampler[_Request]):
    """Hands DataLoader the requests in order."""

    def __init__(self, requests: Iterator[_Request]) -> None:
        self.requests = requests

    def __iter__(self) -> Iterator[_Request]:
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_terminate)


def _pin(data: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(data)  # type: ignore[no-untyped-call]
