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
    """A dataset that reads many samples in one go."""

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

    def __init__(self, *tensors: torch.Tensor, transform: BatchTransform | None = None) -> None:
        assert tensors and all(len(tensor) == len(tensors[0]) for tensor in tensors)
        self.tensors = tensors
        self.transform = transform

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, ...]:
        """The rows at `indices` of every tensor, transformed."""
        rows = torch.from_numpy(indices)
        batch = tuple(tensor.index_select(0, rows) for tensor in self.tensors)
        return batch if self.transform is None else self.transform(batch, indices, epoch)
