"""Random crops and flips of a whole batch at once; what happens to a sample depends on (seed, epoch, sample) alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch.nn import functional as F

from shoal.core.rng import sample_uniforms


def crop_and_flip(
    images: torch.Tensor, indices: np.ndarray, epoch: int, *, seed: int, padding: int, flip: bool
) -> torch.Tensor:
    """`[B, C, H, W]` images, each shifted by up to `padding` pixels (zeros move in) and mirrored or not."""
    draws = sample_uniforms(seed, epoch, indices, 3)
    if padding:
        offsets = torch.from_numpy((draws[:, :2] * (2 * padding + 1)).astype(np.int64))
        images = crop_padded(images, offsets[:, 0], offsets[:, 1], padding)
    if flip:
        images = flip_where(images, torch.from_numpy(draws[:, 2] < 0.5))
    return images


def crop_padded(images: torch.Tensor, tops: torch.Tensor, lefts: torch.Tensor, padding: int) -> torch.Tensor:
    """Pad each image by `padding` zeros on all sides and cut its old size out at (`tops[i]`, `lefts[i]`)."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (padding, padding, padding, padding))
    # A view of every possible window; indexing it copies one window per image.
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(images)), :, tops, lefts]


def flip_where(images: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mirror left to right the images where `mask` is true."""
    return torch.where(mask[:, None, None, None], images.flip(-1), images)


def normalize(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """uint8 `[B, C, H, W]` images as float32 with mean 0 and deviation 1 per channel; mean and std are for 0..1."""
    scale, shift = _scale_and_shift(tuple(mean), tuple(std))
    # One pass that converts and scales, one that shifts: half the time of converting first.
    return (images.contiguous() * scale).sub_(shift)


@cache
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    deviation = torch.tensor(std).view(1, -1, 1, 1)
    return 1 / (255 * deviation), torch.tensor(mean).view(1, -1, 1, 1) / deviation


@dataclass(frozen=True)
class ImageTransform:
    """uint8 images and labels to what a model takes: augmented where asked for, normalised.

    A class and not a closure, so that loader processes can be handed one.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    seed: int = 0
    padding: int = 0
    """Random shifts of up to this many pixels; 0 for none."""
    flip: bool = False

    def __call__(
        self, batch: tuple[torch.Tensor, ...], indices: np.ndarray, epoch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The transformed (images, labels)."""
        images, labels = batch
        if self.padding or self.flip:
            images = crop_and_flip(images, indices, epoch, seed=self.seed, padding=self.padding, flip=self.flip)
        return normalize(images, self.mean, self.std), labels
