"""Reading one micro-batch, whoever does it: the training process, a process beside it, or a machine elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.utils.data import default_collate

from shoal.core.errors import UserError
from shoal.core.rng import derive_seed, isolated_rng, seed_host
from shoal.data.bad_samples import BadSample, Read, read_or_drop, read_or_replace
from shoal.data.dataset import reads_batches
from shoal.data.requests import Request

OnError = Literal["fail", "skip"]


class Answer(NamedTuple):
    """What became of a request."""

    batch: Any
    indices: np.ndarray
    """The samples in it."""
    num_samples: int
    """Those that count."""
    bad: list[BadSample]
    """Samples that could not be read."""


def read_items(dataset: Any, indices: np.ndarray, epoch: int, seed: int) -> Any:
    """One micro-batch, item by item.

    Each item is read, and all are put together, under a seed of their own, (seed, epoch, sample), so that random
    transforms in a user's dataset give the same whoever reads it and after any resume.
    """
    collate = getattr(dataset, "collate", default_collate)
    if _fetches_many(dataset):
        return collate(dataset.__getitems__(indices.tolist()))
    items = []
    with isolated_rng(seed):
        for index in indices.tolist():
            seed_host(derive_seed(seed, epoch, index))
            try:
                items.append(dataset[index])
            except Exception as error:
                _name(error, index)
                raise
        return collate(items)


def _name(error: Exception, index: int) -> None:
    """Say which sample it is, in what Python prints of an error; those of ours say it themselves."""
    if not isinstance(error, UserError) and not getattr(error, "__notes__", None):
        error.add_note(f"(sample {index}; data.on_error=skip leaves such samples out)")


def _fetches_many(dataset: Any) -> bool:
    """Whether it is a Hugging Face dataset that draws nothing at random: reading its rows in one go is much faster.

    Others may have `__getitems__` too, but draw as they please, and each item must draw by itself.
    """
    if not type(dataset).__module__.startswith("datasets.") or not hasattr(dataset, "__getitems__"):
        return False
    return (getattr(dataset, "format", None) or {}).get("type") != "custom"


@dataclass(frozen=True)
class Reading:
    """How the samples of a dataset are read. Goes to other processes whole."""

    dataset: Any
    seed: int
    on_error: OnError = "fail"
    is_raw: bool = False
    """Leave the transforms of a batch to the device."""
    is_evaluation: bool = False
    """What cannot be read is left out, rather than replaced: a sample that is not there must not be measured twice."""

    def __call__(self, request: Request) -> Answer | UserError:
        """The answer; a user's error as a value, because on its way between processes it would be buried in traces."""
        try:
            return self.answer(request)
        except UserError as error:
            return error

    def answer(self, request: Request) -> Answer:
        """The micro-batch, whole."""
        if self.on_error == "fail":
            return Answer(self._read(request.indices, request.epoch), request.indices, request.num_samples, [])

        def read(indices: np.ndarray) -> Any:
            return self._read(indices, request.epoch)

        if self.is_evaluation and request.num_samples:
            batch, indices, bad = read_or_drop(read, request.indices)
            if len(indices):
                return Answer(batch, indices, len(indices), bad)
            batch, indices, _ = self._replacing(read, request)
            return Answer(batch, indices, 0, bad)
        batch, indices, bad = self._replacing(read, request)
        return Answer(batch, indices, request.num_samples, bad if request.num_samples else [])

    def _replacing(self, read: Read, request: Request) -> tuple[Any, np.ndarray, list[BadSample]]:
        starts = getattr(self.dataset, "starts", None)
        return read_or_replace(read, request.indices, request.epoch, len(self.dataset), starts)

    @cached_property
    def _read(self) -> Callable[[np.ndarray, int], Any]:
        if not reads_batches(self.dataset):
            return partial(read_items, self.dataset, seed=self.seed)
        return self.dataset.raw if self.is_raw else self.dataset.batch  # type: ignore[no-any-return]
