"""What a dataset is to the loader: anything with a length and items, or better, one that hands out whole batches."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from shoal.core.spec import DataSpec

Batch = Any
"""What one micro-batch holds; for the shipped sources a tuple of tensors, inputs first."""

BatchTransform = Callable[[tuple[torch.Tensor, ...], np.ndarray, int], tuple[torch.Tensor, ...]]
"""(batch, sample indices, epoch) -> batch: normalising, augmenting. Random only through `core.rng.sample_uniforms`."""


class BatchDataset(Protocol):
    """A dataset that reads many samples in one go.

    It may have more: `raw(indices, epoch)` and `batch_transform`, a BatchTransform that makes of the raw batch what
    `batch` returns, so that this can be done on the device; `starts`, the first sample of each of its files and their
    number at the end, where samples of one file are read together at less cost.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray, epoch: int) -> Batch:
        """The samples at `indices` as one batch; `epoch` is what augmentation may depend on besides the sample."""
        ...


def reads_batches(dataset: Any) -> bool:
    """Whether a dataset has `batch(indices, epoch)`; others have a method of that name for another purpose."""
    method = getattr(dataset, "batch", None)
    if not callable(method):
        return False
    try:
        return list(inspect.signature(method).parameters)[:2] == ["indices", "epoch"]
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True)
class Datasets:
    """The two parts of a source and what a model must know of them."""

    train: Any
    val: Any
    spec: DataSpec


def in_one_go(dataset: Any) -> Any:
    """The dataset itself, or where it only holds tensors, one that reads them by whole-batch indexing."""
    if type(dataset) is torch.utils.data.TensorDataset:
        return MemoryDataset(*dataset.tensors)
    return dataset


class MemoryDataset:
    """Tensors held in memory and read by whole-batch indexing."""

    def __init__(self, *tensors: torch.Tensor, transform: BatchTransform | None = None, trims: bool = False) -> None:
        assert tensors and all(len(tensor) == len(tensors[0]) for tensor in tensors)
        self.tensors = tensors
        self.transform = transform
        self.trims = trims
        """Whether the transform cuts off padding: for that it must know values, for which a GPU would wait."""

    @property
    def batch_transform(self) -> BatchTransform | None:
        """What may be computed on the device."""
        return None if self.trims else self.transform

    def __len__(self) -> int:
        return len(self.tensors[0])

    def to(self, device: torch.device) -> "MemoryDataset":
        """The same with its tensors on a device, where batches are then cut out and transformed.

        Padding is not cut off there: batches of one size are worth more to a GPU than short ones.
        """
        moved = (tensor.to(device) for tensor in self.tensors)
        return MemoryDataset(*moved, transform=None if self.trims and device.type != "cpu" else self.transform)

    def raw(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, ...]:
        """The rows at `indices` of every tensor."""
        rows = torch.from_numpy(indices)
        if self.tensors[0].is_cuda:
            rows = rows.pin_memory().to(self.tensors[0].device, non_blocking=True)
        return tuple([tensor.index_select(0, rows) for tensor in self.tensors])

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, ...]:
        """The rows at `indices` of every tensor, transformed."""
        batch = self.raw(indices, epoch)
        return batch if self.transform is None else self.transform(batch, indices, epoch)


def transform_of(dataset: Any) -> BatchTransform | None:
    """What a dataset would have done to its raw batches on the device; None where it has nothing of the kind."""
    return getattr(dataset, "batch_transform", None) if hasattr(dataset, "raw") else None
