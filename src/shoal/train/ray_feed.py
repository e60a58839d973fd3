"""Data that the CPUs of a Ray cluster read, on its way to a run's workers."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.core.process import Process
from shoal.data.loader import OpenReader
from shoal.data.order import Order
from shoal.data.processes import pinned
from shoal.data.ray_data import RayReaders, RayRows, RowReader
from shoal.data.read import Answer, Reading
from shoal.data.requests import Request


@dataclass(frozen=True)
class RayFeed:
    """One part of the data, training or validation."""

    step: int
    """Samples that all workers take together at a time."""
    num_steps: int
    """Times that they do, over all epochs."""

    def opener(self, part: str, dataset: Any, process: Process, order: Order) -> OpenReader:
        """What opens this worker's reader. Every worker must call this."""
        if not isinstance(dataset, RayRows):
            return lambda reading, count, pin_memory: _Pinned(RayReaders(reading, _answer, count=count), pin_memory)
        # Of this start of the run alone: what an earlier one has begun is not taken for it.
        name = f"{process.group.from_first(secrets.token_hex(8))}-{part}"
        last_epoch = order.epoch_of(max(0, self.num_steps - 1)) if part == "train" else 0

        def open_rows(reading: Reading, count: int, pin_memory: bool) -> RowReader:
            return RowReader(
                dataset,
                name=name,
                worker=process.rank,
                workers=process.world_size,
                step=self.step,
                last_epoch=last_epoch,
                pin_memory=pin_memory,
            )

        return open_rows


def _answer(reading: Reading, request: Request) -> Any:
    return reading(request)


class _Pinned:
    """Pins what readers elsewhere have read."""

    def __init__(self, readers: RayReaders, pin_memory: bool) -> None:
        self._readers = readers
        self._pin_memory = pin_memory

    def answers(self, requests: Iterator[Request]) -> Iterator[Answer]:
        """As the readers."""
        for answer in self._readers.answers(requests):
            yield pinned(answer) if self._pin_memory else answer

    def close(self) -> None:
        """End the readers."""
        self._readers.close()
