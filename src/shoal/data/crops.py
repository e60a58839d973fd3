"""How an image becomes a square of pixels: a random piece of it for training, the middle otherwise."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.core.recycled import RECYCLED
from shoal.core.rng import sample_uniforms
from shoal.data.decode import Box, decode_crop

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RESIZE_RATIO = 256 / 224
"""Validation images are scaled so that the crop leaves this margin, as is usual for ImageNet."""
CROP_TRIES = 10
NUM_DRAWS = 2 * CROP_TRIES + 3


def random_crop_box(width: int, height: int, draws: np.ndarray) -> Box:
    """A box of 8 to 100 percent of the area and an aspect ratio of 3/4 to 4/3; the middle where none fits."""
    for area_draw, ratio_draw in draws[: 2 * CROP_TRIES].reshape(CROP_TRIES, 2):
        area = width * height * (0.08 + 0.92 * area_draw)
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * ratio_draw)
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(draws[-3] * (width - box_width + 1))
            top = int(draws[-2] * (height - box_height + 1))
            return left, top, left + box_width, top + box_height
    box_width = max(1, min(width, round(height * 4 / 3)))
    box_height = max(1, min(height, round(width * 4 / 3)))
    return _centered(width, height, box_width, box_height)


def middle_box(width: int, height: int, size: int) -> Box:
    """The square in the middle that is `size` pixels when the shorter side is scaled to `size` and a margin."""
    side = max(1, round(min(width, height) * size / round(size * RESIZE_RATIO)))
    return _centered(width, height, side, side)


def _centered(width: int, height: int, box_width: int, box_height: int) -> Box:
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height


@dataclass(frozen=True)
class Crops:
    """Squares of `size` pixels; with a seed the cut is random and half of them are mirrored, else it is the middle."""

    size: int
    augment_seed: int | None

    def empty(self, count: int) -> torch.Tensor:
        """Room for so many squares, uint8 [count, 3, size, size]."""
        return RECYCLED.empty((count, 3, self.size, self.size), torch.uint8)

    def draws(self, indices: np.ndarray, epoch: int) -> Any:
        """What is random of each sample, given to `cut`."""
        if self.augment_seed is None:
            return [None] * len(indices)
        return sample_uniforms(self.augment_seed, epoch, indices, NUM_DRAWS)

    def cut(self, content: bytes, draws: np.ndarray | None, out: torch.Tensor) -> None:
        """Decode an image and write its square to `out`; raises CannotDecodeError."""
        if draws is None:
            square = decode_crop(content, lambda width, height: middle_box(width, height, self.size), self.size)
        else:
            square = decode_crop(content, lambda width, height: random_crop_box(width, height, draws), self.size)
        pixels = torch.from_numpy(square)
        if draws is not None and draws[-1] < 0.5:
            pixels = pixels.flip(1)
        out.copy_(pixels.permute(2, 0, 1))
