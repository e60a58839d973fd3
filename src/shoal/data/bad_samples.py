"""Samples that cannot be read: what they are called, and which others take their place."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.errors import UserError
from shoal.core.rng import derive_seed

_TRIES = 30
"""Other samples tried in the place of one before the data is called broken."""


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be read."""

    index: int
    where: str
    """File and row."""
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


class BadSampleError(UserError):
    """Some of the samples that were asked for cannot be read."""

    def __init__(self, bad: list[BadSample], remedy: str = "replace it or remove it") -> None:
        super().__init__(bad, remedy)
        self.bad = bad
        self.remedy = remedy

    def __str__(self) -> str:
        return f"data.dir: {self.bad[0]}; {self.remedy}, or leave such samples out with data.on_error=skip"


class DataGoneError(UserError):
    """Nothing can be read any more, so no other sample can take the place of one."""


def substitutes(index: int, epoch: int, num_samples: int, starts: np.ndarray | None) -> Iterator[int]:
    """Samples to take in the place of one, in this order; they depend on (epoch, sample) alone.

    Of the same file first, where `starts` says which sample each begins with, since that is at hand; then of those
    after it. Drawn, not the next one: of a file that is cut short, one sample would take the place of thousands.
    """
    for number in range(1, _TRIES + 1):
        drawn = derive_seed(epoch, index, number)
        if starts is None:
            yield drawn % num_samples
            continue
        home = int(np.searchsorted(starts, index, side="right")) - 1
        file = (home + max(0, number - _TRIES // 5)) % (len(starts) - 1)
        first, last = int(starts[file]), int(starts[file + 1])
        if last > first:
            yield first + drawn % (last - first)


Read = Callable[[np.ndarray], Any]


def read_or_replace(
    read: Read, indices: np.ndarray, epoch: int, num_samples: int, starts: np.ndarray | None
) -> tuple[Any, np.ndarray, list[BadSample]]:
    """What `read` makes of the samples, with others in the place of those that cannot be read; the samples that it then
    is; and which could not be read.

    The batch keeps its size, and so does the global batch.
    """
    chosen = indices.copy()
    queues: dict[int, Iterator[int]] = {}
    bad: dict[int, BadSample] = {}
    while True:
        try:
            return read(chosen), chosen, [bad[place] for place in sorted(bad)]
        except DataGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever code that reads a sample may raise
            failing = _failing(read, chosen, error)
        for place, sample in failing.items():
            bad.setdefault(place, sample)
            queue = queues.setdefault(place, substitutes(int(indices[place]), epoch, num_samples, starts))
            other = next(queue, None)
            if other is None:
                raise _give_up(bad[place])
            chosen[place] = other


def read_or_drop(read: Read, indices: np.ndarray) -> tuple[Any, np.ndarray, list[BadSample]]:
    """What `read` makes of those samples that can be read, None where there are none; which those are; which cannot."""
    bad: list[BadSample] = []
    while len(indices):
        try:
            return read(indices), indices, bad
        except DataGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever code that reads a sample may raise
            failing = _failing(read, indices, error)
        bad += [failing[place] for place in sorted(failing)]
        indices = np.delete(indices, list(failing))
    return None, indices, bad


def _failing(read: Read, indices: np.ndarray, error: Exception) -> dict[int, BadSample]:
    """Which places of a batch cannot be read: as the error says, or tried one by one."""
    if isinstance(error, BadSampleError):
        named = {sample.index: sample for sample in error.bad}
        found = {place: named[int(index)] for place, index in enumerate(indices) if int(index) in named}
    else:
        found = {}
        for place, index in enumerate(indices):
            try:
                read(indices[place : place + 1])
            except DataGoneError:
                raise
            except BadSampleError as single:
                found[place] = single.bad[0]
            except Exception as single:  # noqa: BLE001
                found[place] = BadSample(int(index), f"sample {int(index)}", f"{type(single).__name__}: {single}")
    if not found:  # each can be read, and all together cannot
        raise error
    return found


def _give_up(first: BadSample) -> UserError:
    return UserError(
        f"data.on_error: skip finds nothing to take in the place of {first}; {_TRIES} other samples cannot be read "
        "either, so look at the data, or at the code that reads it"
    )
