"""Random images of any size whose class can be learned; no files."""

import torch

from shoal.core.rng import derive_seed
from shoal.core.spec import DataSpec
from shoal.data.dataset import Datasets, MemoryDataset
from shoal.data.section import Synthetic


def make_synthetic(section: Synthetic) -> Datasets:
    """Standard normal images; the class is the largest of `classes` fixed random projections of the image."""
    channels, height, width = section.shape
    num_pixels = channels * height * width
    # Directions of equal length make the classes about equally frequent.
    projection = torch.nn.functional.normalize(_normal(section.seed, 0, num_pixels, section.classes), dim=0)

    def part(stream: int, num_samples: int) -> MemoryDataset:
        pixels = _normal(section.seed, stream, num_samples, num_pixels)
        labels = (pixels @ projection).argmax(dim=1)
        return MemoryDataset(pixels.view(num_samples, channels, height, width), labels)

    return Datasets(
        train=part(1, section.samples),
        val=part(2, section.val_samples),
        spec=DataSpec(image_shape=(channels, height, width), num_classes=section.classes),
    )


def _normal(seed: int, stream: int, rows: int, columns: int) -> torch.Tensor:
    # A generator of its own: the run's random state does not move. torch's is three times as fast as NumPy's.
    generator = torch.Generator().manual_seed(derive_seed(seed, stream) >> 1)
    return torch.randn(rows, columns, generator=generator)
