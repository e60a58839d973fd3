"""Ways to put the samples of an epoch in order. Each gives any stretch of it without computing what is before that.

All depend on (seed, epoch) and the sizes alone, so that a run can go on anywhere, with any number of workers.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from shoal.core.rng import derive_seed

MOST_PERMUTED = 1 << 24
"""Samples up to which an epoch's permutation is held in memory (128 MB); more are scrambled position by position."""
_ROUNDS = 6


class EpochOrder(Protocol):
    """The order of samples in one epoch."""

    def take(self, first: int, last: int) -> np.ndarray:
        """The samples at positions [first, last), int64."""
        ...


@dataclass(frozen=True)
class InOrder:
    """As the dataset has them."""

    def take(self, first: int, last: int) -> np.ndarray:
        """Positions are samples."""
        return np.arange(first, last)


@dataclass(frozen=True)
class Permuted:
    """All samples shuffled, by a permutation that is held in memory."""

    permutation: np.ndarray

    def take(self, first: int, last: int) -> np.ndarray:
        """A stretch of the permutation."""
        return self.permutation[first:last]


@dataclass(frozen=True)
class Scrambled:
    """All samples shuffled, without memory: a cipher on positions, as format-preserving encryption does it.

    A Feistel network permutes the numbers of an even number of bits; what falls outside the samples is enciphered again
    until it falls inside, which keeps it a permutation.
    """

    num_samples: int
    key: int

    @cached_property
    def _half_bits(self) -> int:
        return max(1, -(-(self.num_samples - 1).bit_length() // 2))

    def take(self, first: int, last: int) -> np.ndarray:
        """Each position by itself."""
        values = self._encipher(np.arange(first, last, dtype=np.uint64))
        outside = values >= self.num_samples
        while outside.any():
            values[outside] = self._encipher(values[outside])
            outside = values >= self.num_samples
        return values.astype(np.int64)

    def _encipher(self, values: np.ndarray) -> np.ndarray:
        half = np.uint64(self._half_bits)
        mask = (np.uint64(1) << half) - np.uint64(1)
        left, right = values >> half, values & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right, derive_seed(self.key, number)) & mask)
        return (left << half) | right


def _mixed(values: np.ndarray, key: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = (values + np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(values ^ (values >> np.uint64(32)))


@lru_cache(maxsize=2)  # the epoch of the loop, and that of who reads ahead of it
def permuted(num_samples: int, seed: int, epoch: int) -> EpochOrder:
    """All samples shuffled. NumPy keeps this generator's stream fixed over its versions (NEP 19)."""
    if num_samples > MOST_PERMUTED:
        return Scrambled(num_samples, derive_seed(seed, epoch))
    return Permuted(_generator(seed, epoch).permutation(num_samples))


def _generator(seed: int, *parts: int) -> np.random.RandomState:
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, *parts])


@dataclass(frozen=True)
class Windows:
    """How samples in files are shuffled so that files are read one after the other, and by few machines each.

    The files are shuffled and laid end to end. That row is cut into lanes, which are read side by side: every step
    takes its first samples from the first lane, and so on, so that a worker, who computes a part of every step, reads a
    few lanes and not the others, however many workers there are. Within a lane, samples are shuffled within a window.
    """

    rows: np.ndarray
    """Samples of every file."""
    window: int
    """Samples, over all lanes, that change places with each other."""
    lanes: int

    def in_epoch(self, global_batch: int, seed: int, epoch: int) -> "Windowed":
        """The order of one epoch."""
        files = _generator(seed, epoch).permutation(len(self.rows))
        return Windowed(self, global_batch, seed, epoch, files)

    @cached_property
    def starts(self) -> np.ndarray:
        """The first sample of every file, and the number of all samples at the end."""
        return np.concatenate([[0], np.cumsum(self.rows)])


@dataclass(frozen=True)
class _Lane:
    """Every step takes `slots` samples from a stretch of the row of files, at `first_slot` of its own."""

    number: int
    start: int
    length: int
    first_slot: int
    slots: int
    window: int


@dataclass(frozen=True, eq=False)
class Windowed:
    """The order of one epoch of files. What does not fill a step at the end is a lane of its own, for the last one."""

    windows: Windows
    global_batch: int
    seed: int
    epoch: int
    files: np.ndarray
    """In the order of this epoch."""

    @cached_property
    def _file_starts(self) -> np.ndarray:
        """Where in the row each file starts."""
        return np.concatenate([[0], np.cumsum(self.windows.rows[self.files])])

    @cached_property
    def _num_samples(self) -> int:
        return int(self._file_starts[-1])

    @cached_property
    def _full_steps(self) -> int:
        return self._num_samples // self.global_batch

    @cached_property
    def _lanes(self) -> list[_Lane]:
        batch, steps = self.global_batch, self._full_steps
        count = max(1, min(self.windows.lanes, batch, len(self.files)))
        edges = [number * batch // count for number in range(count + 1)]
        lanes = []
        for number in range(count):
            first, slots = edges[number], edges[number + 1] - edges[number]
            window = max(1, self.windows.window * slots // batch)
            lanes.append(_Lane(number, steps * first, steps * slots, first, slots, window))
        rest = self._num_samples - steps * batch
        return [*lanes, _Lane(count, steps * batch, rest, 0, max(rest, 1), max(1, self.windows.window))]

    def take(self, first: int, last: int) -> np.ndarray:
        """The samples at positions [first, last)."""
        positions = np.arange(first, last)
        slots = positions % self.global_batch
        steps = positions // self.global_batch
        *lanes, rest = self._lanes
        number = np.searchsorted([lane.first_slot for lane in lanes], slots, side="right") - 1
        number = np.where(steps < self._full_steps, number, rest.number)
        row = np.empty(len(positions), dtype=np.int64)
        for lane_number in np.unique(number):
            lane, here = self._lanes[lane_number], number == lane_number
            step = np.where(steps[here] < self._full_steps, steps[here], 0)
            row[here] = lane.start + self._shuffled(lane, step * lane.slots + slots[here] - lane.first_slot)
        return self._samples(row)

    def _shuffled(self, lane: _Lane, places: np.ndarray) -> np.ndarray:
        """Where in its lane the sample of each place comes from."""
        blocks, within = np.divmod(places, lane.window)
        found = np.empty_like(places)
        for block in np.unique(blocks):
            here = blocks == block
            size = min(lane.window, lane.length - int(block) * lane.window)
            found[here] = (
                block * lane.window + _permutation(self.seed, self.epoch, lane.number, int(block), size)[within[here]]
            )
        return found

    def _samples(self, row: np.ndarray) -> np.ndarray:
        """From places in the row of files to samples."""
        place = np.searchsorted(self._file_starts, row, side="right") - 1
        return np.asarray(self.windows.starts[self.files[place]] + row - self._file_starts[place])

    def files_from(self, step: int, first_slot: int, last_slot: int) -> Iterator[tuple[int, list[int]]]:
        """The files that slots [first_slot, last_slot) of the steps from `step` on need, a window at a time, in order,
        each time with the first step that does. A file comes again where another window needs it too."""
        *lanes, rest = self._lanes
        mine = [lane for lane in lanes if lane.first_slot < last_slot and lane.first_slot + lane.slots > first_slot]
        for needed, number, block in heapq.merge(*(self._blocks_from(lane, step) for lane in mine)):
            yield needed, self._files_of(self._lanes[number], block)
        if rest.length:  # which workers divide anew, in other parts
            for block in range(-(-rest.length // rest.window)):
                yield self._full_steps, self._files_of(rest, block)

    def _blocks_from(self, lane: _Lane, step: int) -> Iterator[tuple[int, int, int]]:
        """The windows of a lane from `step` on: the step that first needs it, lane, number."""
        for block in range(step * lane.slots // lane.window, -(-lane.length // lane.window)):
            yield block * lane.window // lane.slots, lane.number, block

    def _files_of(self, lane: _Lane, block: int) -> list[int]:
        first = lane.start + block * lane.window
        last = min(first + lane.window, lane.start + lane.length)
        places = np.searchsorted(self._file_starts, [first, last - 1], side="right") - 1
        return [int(file) for file in self.files[places[0] : places[1] + 1] if self.windows.rows[file]]


@lru_cache(maxsize=40)  # of a few windows more than lanes
def _permutation(seed: int, epoch: int, lane: int, block: int, size: int) -> np.ndarray:
    return _generator(seed, epoch, lane, block).permutation(size).astype(np.int32)
