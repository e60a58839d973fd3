"""Random changes to a whole batch of images at once, on the device where the images are.

What happens to a sample depends on (seed, epoch, sample) alone, and for mixing on its neighbour too. Every number is
drawn on the host by `sample_uniforms`, and what follows is plain arithmetic in a fixed order, so that a sample
comes out the same whoever computes it. These are the draws of a sample, by their numbers:

    0 to 2    here: shift down, shift right, mirrored or not
    0 to 22   where images are cut out at random as they are decoded: the cut, mirrored or not
    24 to 27  mixing: mixup or cutmix, how much of the neighbour, the row and the column of the middle of the box
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from shoal.core.recycled import RECYCLED
from shoal.core.rng import sample_uniforms

SHIFT_DRAWS = slice(0, 2)
FLIP_DRAW = 2
MIXING_DRAWS = slice(24, 28)
_CACHED = 1 << 17
"""Numbers that are worked on together: half a megabyte."""


def crop_and_flip(
    images: torch.Tensor, indices: np.ndarray, epoch: int, *, seed: int, padding: int, flip: bool
) -> torch.Tensor:
    """`[B, C, H, W]` images, each shifted by up to `padding` pixels (zeros move in) and mirrored or not."""
    draws = sample_uniforms(seed, epoch, indices, FLIP_DRAW + 1)
    if padding:
        offsets = _send((draws[:, SHIFT_DRAWS] * (2 * padding + 1)).astype(np.int64), images.device)
        images = crop_padded(images, offsets[:, 0], offsets[:, 1], padding)
    if flip:
        images = flip_where(images, _send(draws[:, FLIP_DRAW] < 0.5, images.device))
    return images


def crop_padded(images: torch.Tensor, tops: torch.Tensor, lefts: torch.Tensor, padding: int) -> torch.Tensor:
    """Pad each image by `padding` zeros on all sides and cut its old size out at (`tops[i]`, `lefts[i]`)."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (padding, padding, padding, padding))
    # A view of every possible window; indexing it copies one window per image.
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(images), device=images.device), :, tops, lefts]


def flip_where(images: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mirror left to right the images where `mask` is true."""
    return _where(mask[:, None, None, None], images.flip(-1), images)


def normalize(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """uint8 `[B, C, H, W]` images as float32 with mean 0 and deviation 1 per channel; mean and std are for 0..1."""
    device = images.device
    scale, shift = _scale_and_shift(tuple(mean), tuple(std), device)
    if images.numel() <= _CACHED or device.type != "cpu" or images.dtype != torch.uint8:
        return (images.contiguous() * scale).sub_(shift)
    # Some at a time, which stay in the processor's cache from one pass to the next, into memory that was used before.
    # By numpy, on one thread: where processes that read have the cores, torch's threads wait for each other.
    normalized = RECYCLED.empty(tuple(images.shape), torch.float32)
    pixels, into, by, less = images.numpy(), normalized.numpy(), scale.numpy(), shift.numpy()
    together = max(1, _CACHED // max(1, images[0].numel())) if len(images) else 1
    for first in range(0, len(images), together):
        some = into[first : first + together]
        np.copyto(some, pixels[first : first + together])
        some *= by
        some -= less
    return normalized


@cache
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    deviation = torch.tensor(std).view(1, -1, 1, 1)
    scale, shift = 1 / (255 * deviation), torch.tensor(mean).view(1, -1, 1, 1) / deviation
    # Waits for the copies, once: other streams than this one will use them too.
    return scale.to(device), shift.to(device)


class Mixing(NamedTuple):
    """What each sample of a batch takes from its neighbour."""

    weights: np.ndarray
    """float32 [B]: the part of the label that comes from the neighbour."""
    is_cut: np.ndarray
    """bool [B]: whether it comes as a box of pixels (cutmix) rather than as a part of every pixel (mixup)."""
    boxes: np.ndarray
    """int64 [B, 4]: top, bottom, left, right; empty where nothing is cut."""


def draw_mixing(
    seed: int, epoch: int, indices: np.ndarray, *, mixup: float, cutmix: float, height: int, width: int
) -> Mixing:
    """The drawn shares, from Beta(alpha, alpha); for cutmix those that the boxes really have, which end at the border.

    Sample i goes with i^1: (0, 1), (2, 3), ... So pairs stay together in any micro-batches of even sizes. A last one
    without a neighbour takes nothing.
    """
    from scipy.special import betaincinv

    draws = sample_uniforms(seed, epoch, indices, MIXING_DRAWS.stop)[:, MIXING_DRAWS]
    is_cut = draws[:, 0] >= 0.5 if mixup and cutmix else np.full(len(indices), bool(cutmix))
    alphas = np.where(is_cut, cutmix, mixup)
    weights = 1 - betaincinv(alphas, alphas, draws[:, 1])
    if len(indices) % 2:
        weights[-1] = 0
    sizes = np.array([height, width])
    halves = (sizes * np.sqrt(weights * is_cut)[:, None]).astype(np.int64) // 2
    middles = (draws[:, 2:4] * sizes).astype(np.int64)
    starts, ends = np.maximum(middles - halves, 0), np.minimum(middles + halves, sizes)
    weights = np.where(is_cut, (ends - starts).prod(axis=1) / (height * width), weights)
    boxes = np.stack([starts[:, 0], ends[:, 0], starts[:, 1], ends[:, 1]], axis=1)
    return Mixing(weights.astype(np.float32), is_cut, boxes)


def cut_in(images: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """`[B, C, H, W]` images with the pixels of their neighbours inside `boxes` (see `Mixing`)."""
    height, width = images.shape[-2:]
    top, bottom, left, right = boxes[:, :, None].unbind(1)
    rows, columns = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    in_rows, in_columns = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
    return _where((in_rows[:, :, None] & in_columns[:, None, :])[:, None], _neighbours(images), images)


def blend_(images: torch.Tensor, differences: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Move each of `images` in place towards its neighbour, by its weight.

    `differences` `[B // 2, C, H, W]` are those from the first to the second of each pair; they are overwritten.
    """
    even = len(images) // 2 * 2
    weights = weights[:even, None, None, None]
    # Multiplied first and added then, not in one: that is rounded the same on every device.
    images[0:even:2].add_(differences * weights[0::2])
    images[1:even:2].sub_(differences.mul_(weights[1::2]))
    return images


def blend_labels(labels: torch.Tensor, weights: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Class probabilities float32 `[B, num_classes]`: the neighbour's class has `weights[i]`, the own one the rest."""
    own = F.one_hot(labels, num_classes).float()
    weights = weights[:, None]
    return (own * (1 - weights)).add_(_neighbours(own).mul_(weights))


def _neighbours(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose row i is the one at i^1; a last one without a neighbour stays."""
    even = len(tensor) // 2 * 2
    swapped = tensor[:even].reshape(-1, 2, *tensor.shape[1:]).flip(1).flatten(0, 1)
    return torch.cat([swapped, tensor[even:]]) if even < len(tensor) else swapped


def _where(mask: torch.Tensor, chosen: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`torch.where`, whose kernel for bytes on a CPU takes four times as long as these."""
    if other.dtype != torch.uint8 or other.device.type != "cpu":
        return torch.where(mask, chosen, other)
    all_bits = mask.to(torch.uint8).neg_()
    return (chosen ^ other).bitwise_and_(all_bits).bitwise_xor_(other)


def _send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array of the host as a tensor on `device`, without waiting for the device."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


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
    mixup: float = 0.0
    """Blend with the neighbour, in shares from Beta(mixup, mixup); 0 for none."""
    cutmix: float = 0.0
    """Take a box from the neighbour, of an area from Beta(cutmix, cutmix); 0 for none. With mixup: one or the other."""
    num_classes: int | None = None
    """Needed by these two, which make class probabilities of the labels."""

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or a positive number, not {getattr(self, name)}")
        if (self.mixup or self.cutmix) and self.num_classes is None:
            raise ValueError("num_classes is needed by mixup and cutmix")

    def __call__(
        self, batch: tuple[torch.Tensor, ...], indices: np.ndarray, epoch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The transformed (images, labels); labels are int64 [B], and float32 [B, num_classes] where mixing is on."""
        images, labels = batch
        if self.padding or self.flip:
            images = crop_and_flip(images, indices, epoch, seed=self.seed, padding=self.padding, flip=self.flip)
        if self.num_classes is None or not (self.mixup or self.cutmix):
            return normalize(images, self.mean, self.std), labels
        return self._mix(images, labels, indices, epoch, self.num_classes)

    def _mix(
        self, images: torch.Tensor, labels: torch.Tensor, indices: np.ndarray, epoch: int, num_classes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        height, width = images.shape[-2:]
        mixing = draw_mixing(
            self.seed, epoch, indices, mixup=self.mixup, cutmix=self.cutmix, height=height, width=width
        )
        # Boxes are cut while pixels are bytes. Blending comes last: in floats it works in place.
        mixed = cut_in(images, _send(mixing.boxes, images.device)) if self.cutmix else images
        normal = normalize(mixed, self.mean, self.std)
        if self.mixup:
            even = len(images) // 2 * 2
            if self.cutmix:  # a neighbour is blended in as it was before a box was cut into it
                differences = normalize(images[1:even:2], self.mean, self.std)
                differences.sub_(normalize(images[0:even:2], self.mean, self.std))
            else:
                differences = normal[1:even:2] - normal[0:even:2]
            blended = np.where(mixing.is_cut, np.float32(0), mixing.weights)
            blend_(normal, differences, _send(blended, images.device))
        return normal, blend_labels(labels, _send(mixing.weights, labels.device), num_classes)
