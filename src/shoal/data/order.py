"""Which samples a step consumes: a pure function of seed, step and sizes, so that any step can be resumed at once.

Epoch `e` is a permutation of all samples that depends on (seed, e) and sizes alone (`shuffle.py`). Step `j` of an epoch
takes positions [j*G, (j+1)*G) of it, G being the global batch; the last step of an epoch takes what is left, so that
every sample comes exactly once an epoch.
(Gradients are scaled by the samples really in the step, so a short last step is not distorted.)
Workers take contiguous parts of a step whose sizes differ by at most one, each cut into micro-batches.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.data.shuffle import EpochOrder, InOrder, Windows, permuted


@dataclass(frozen=True, eq=False)
class Order:
    """The order of samples of one run."""

    num_samples: int
    global_batch: int
    seed: int
    windows: Windows | None = None
    """Samples in files, shuffled so that these are read one after the other; None: any sample anywhere."""
    is_shuffled: bool = True
    """False: as the dataset has them, every epoch."""

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps it takes to go over all samples once; the last may be short."""
        return -(-self.num_samples // self.global_batch)

    @cached_property
    def windows_hash(self) -> str | None:
        """Of all that the order of samples in files depends on; None where any sample may be anywhere."""
        if self.windows is None:
            return None
        rows = self.windows.rows.astype("<i8").tobytes()
        return hashlib.sha256(rows + f"{self.windows.window},{self.windows.lanes}".encode()).hexdigest()

    def epoch_of(self, step: int) -> int:
        """The epoch that step `step` belongs to, counted from 0."""
        return step // self.steps_per_epoch

    def bounds(self, step: int) -> tuple[int, int]:
        """The positions [first, last) within its epoch that step `step` consumes."""
        first = step % self.steps_per_epoch * self.global_batch
        return first, min(first + self.global_batch, self.num_samples)

    def in_epoch(self, epoch: int) -> EpochOrder:
        """The order of samples in an epoch."""
        if not self.is_shuffled:
            return InOrder()
        if self.windows is not None:
            return self.windows.in_epoch(self.global_batch, self.seed, epoch)
        return permuted(self.num_samples, self.seed, epoch)

    def permutation(self, epoch: int) -> np.ndarray:
        """All samples in the order of an epoch."""
        return self.in_epoch(epoch).take(0, self.num_samples)


def worker_slices(first: int, last: int, rank: int, world_size: int, micro_batch: int) -> list[tuple[int, int]]:
    """A worker's micro-batches of the positions [first, last).

    Every worker gets the same number of them, because collectives need it; in a short last step some may be empty.
    """
    count = last - first
    # Rounded up: the first ranks have the larger shares, so rank 0, whose statistics count, is never without.
    start = first - (-count * rank // world_size)
    end = first - (-count * (rank + 1) // world_size)
    largest_share = -(-count // world_size)
    num_micro = -(-largest_share // micro_batch)
    return [(min(start + i * micro_batch, end), min(start + (i + 1) * micro_batch, end)) for i in range(num_micro)]
