"""What a worker reads, and when: from the order of samples to one request a micro-batch. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shoal.data.order import Order, worker_slices

_STAND_INS = 2
"""Samples that stand in for an empty micro-batch; batch norm cannot train on one alone."""


class Request(NamedTuple):
    """One micro-batch to read."""

    epoch: int
    indices: np.ndarray
    num_samples: int
    """Those that count: none where the indices are stand-ins."""


def step_requests(
    order: Order, start_step: int, num_steps: int, rank: int, world_size: int, micro_batch: int
) -> Iterator[list[Request]]:
    """A worker's micro-batches of steps [start_step, num_steps); nothing of what is before them is computed."""
    epoch = -1
    for step in range(start_step, num_steps):
        if order.epoch_of(step) != epoch:
            epoch = order.epoch_of(step)
            in_epoch = order.in_epoch(epoch)
        first, last = order.bounds(step)
        slices = worker_slices(first, last, rank, world_size, micro_batch)
        if len(slices) == 1 and slices[0][1] > slices[0][0]:
            yield [Request(epoch, in_epoch.take(*slices[0]), slices[0][1] - slices[0][0])]
            continue
        # In one go, with the stand-ins: cutting is cheaper than asking often.
        start, end = slices[0][0], slices[-1][1]
        mine = in_epoch.take(start, end)
        stand_ins = in_epoch.take(first, min(first + _STAND_INS, last)) if any(a == b for a, b in slices) else mine[:0]
        yield [_request(epoch, mine[a - start : b - start], stand_ins) for a, b in slices]


def evaluation_requests(num_samples: int, rank: int, world_size: int, batch: int) -> list[Request]:
    """A worker's share of a dataset in its own order; every worker gets as many, some of which only stand in."""
    slices = worker_slices(0, num_samples, rank, world_size, batch)
    stand_ins = np.arange(min(_STAND_INS, num_samples))
    return [_request(0, np.arange(start, end), stand_ins) for start, end in slices]


def _request(epoch: int, indices: np.ndarray, stand_ins: np.ndarray) -> Request:
    """Where there are no samples, others stand in for them: collectives need every worker to compute as often as the
    others, so an empty micro-batch is computed too, and counts for nothing."""
    return Request(epoch, indices, len(indices)) if len(indices) else Request(epoch, stand_ins, 0)
