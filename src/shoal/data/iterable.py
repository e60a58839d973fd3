"""Datasets that can only be gone through from the beginning: torch's IterableDataset, or anything with a length."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from shoal.core.errors import UserError
from shoal.core.rng import derive_seed, isolated_rng


class IterableRows:
    """Samples in the order in which they come, the same every time it is gone through in an epoch.

    Every worker goes through all samples and keeps its own, and a run that is resumed goes through those before: for
    datasets that hand out samples by number, neither is so. An epoch is one pass, after `set_epoch(epoch)` where the
    dataset has that. Each item is drawn under a seed of its own, as those of other datasets are.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self._length = len(dataset)
        self._epoch = -1
        self._position = 0
        self._items: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epoch": -1, "_position": 0, "_items": iter(())}

    def batch(self, indices: np.ndarray, epoch: int) -> Any:
        """The samples at `indices`; those in between are gone through."""
        wanted = sorted({int(index) for index in indices})
        if epoch != self._epoch or (wanted and wanted[0] < self._position):
            self._begin(epoch)
        found = {index: self._at(index) for index in wanted}
        items = [found[int(index)] for index in indices]
        return getattr(self.dataset, "collate", default_collate)(items)

    def _begin(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        with isolated_rng(derive_seed(self.seed, epoch)):
            self._items = iter(self.dataset)
        self._epoch, self._position = epoch, 0

    def _at(self, index: int) -> Any:
        while True:
            with isolated_rng(derive_seed(self.seed, self._epoch, self._position)):
                try:
                    item = next(self._items)
                except StopIteration:
                    raise UserError(
                        f"data: {type(self.dataset).__name__} ended after {self._position} samples, and its length is "
                        f"{self._length}; correct its __len__"
                    ) from None
            self._position += 1
            if self._position > index:
                return item
