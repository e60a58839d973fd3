"""scikit-learn's bundled digits: images without a download."""

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch

from shoal.core.spec import DataSpec
from shoal.data.dataset import Datasets, MemoryDataset
from shoal.data.section import Digits


def load_digits(section: Digits) -> Datasets:
    """1,797 images [1, 8, 8] with values in 0..1; `val_fraction` of them, always the same ones, for validation."""
    pixels, digits = _pixels_and_digits()
    images = torch.from_numpy((pixels / 16.0).astype(np.float32)).view(-1, 1, 8, 8)
    labels = torch.from_numpy(digits.astype(np.int64))
    num_val = min(max(round(len(images) * section.val_fraction), 1), len(images) - 1)
    # RandomState's streams are frozen across NumPy versions, so the split is too.
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(images)))
    val, train = order[:num_val], order[num_val:]
    return Datasets(
        train=MemoryDataset(images[train], labels[train]),
        val=MemoryDataset(images[val], labels[val]),
        spec=DataSpec(image_shape=(1, 8, 8), num_classes=10),
    )


def _pixels_and_digits() -> tuple[np.ndarray, np.ndarray]:
    """Straight from the file that scikit-learn brings, because importing it takes longer than the rest of a start."""
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if package is not None else None
    if file is None or not file.is_file():  # should it ever be moved
        from sklearn import datasets

        pixels, digits = datasets.load_digits(return_X_y=True)
        return pixels, digits
    with gzip.open(file, "rt", encoding="utf-8") as rows:
        table = np.loadtxt(rows, delimiter=",")
    return table[:, :-1], table[:, -1]
