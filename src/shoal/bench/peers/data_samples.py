"""The samples that all contenders of `shoal bench data --files` read, and what each makes of one.

The transforms are those of Shoal's own image folder, written as one writes them for a `Dataset`: a sample at a time.
"""

import io
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZE = 224
"""Height and width of a ready image."""
CONTEXT = 1024
"""Tokens that a ready window is long."""
VOCAB_SIZE = 50_257
IDS_FILE = "train.bin"
IMAGE_FOLDER = "train"
NUM_SHARDS = 16
MOST_SHARD_BYTES = 64 * 2**20
"""What Streaming and LitData take by default; small data is cut finer, so that every worker has several shards."""

_MEAN, _STD = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
_SCALE = (1 / (255 * _STD)).view(3, 1, 1)
_SHIFT = (_MEAN / _STD).view(3, 1, 1)


def list_images(source: Path) -> list[tuple[Path, int]]:
    """Files and labels, sorted as every reader of image folders sorts them."""
    classes = sorted(folder for folder in (source / IMAGE_FOLDER).iterdir() if folder.is_dir())
    return [(path, label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]


def mixed_images(source: Path) -> list[tuple[Path, int]]:
    """The same in an order that mixes the classes: how one writes shards that are read one after the other."""
    listed = list_images(source)
    return random.Random(0).sample(listed, len(listed))  # noqa: S311 - an order, not a secret


def windows(source: Path) -> np.ndarray:
    """All windows of `CONTEXT` tokens and the one after, as a view [N, CONTEXT + 1] of the mapped file."""
    ids = np.memmap(source / IDS_FILE, dtype="<u2", mode="r")
    count = (len(ids) - 1) // CONTEXT
    return np.lib.stride_tricks.as_strided(ids, (count, CONTEXT + 1), (2 * CONTEXT, 2), writeable=False)


def mixed_windows(source: Path) -> Iterator[np.ndarray]:
    """Window after window in a random order."""
    all_windows = windows(source)
    return (all_windows[row] for row in np.random.default_rng(0).permutation(len(all_windows)))


def shard_bytes(source: Path) -> int:
    """How large shards are to be."""
    total = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    return max(2**16, min(MOST_SHARD_BYTES, total // NUM_SHARDS))


def ready_image(jpeg: bytes) -> torch.Tensor:
    """Decoded, cut at random, mirrored or not, normalised: float32 [3, SIZE, SIZE]."""
    return normalized(torch.from_numpy(ready_pixels(jpeg)).permute(2, 0, 1))


def ready_pixels(jpeg: bytes) -> np.ndarray:
    """Decoded, cut at random, mirrored or not: uint8 [SIZE, SIZE, 3]."""
    from PIL import Image

    with Image.open(io.BytesIO(jpeg)) as file:
        image: Any = file.convert("RGB")
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=random_crop_box(*image.size))
    if random.random() < 0.5:  # noqa: S311
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(image)


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., 3, H, W]` as float32 with mean 0 and deviation 1."""
    return (pixels.contiguous() * _SCALE).sub_(_SHIFT)


def random_crop_box(width: int, height: int) -> tuple[int, int, int, int]:
    """As `shoal.data.image_folder.random_crop_box`: 8 to 100 percent of the area, an aspect ratio of 3/4 to 4/3."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)  # noqa: S311
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))  # noqa: S311
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = random.randint(0, width - box_width), random.randint(0, height - box_height)  # noqa: S311
            return left, top, left + box_width, top + box_height
    box_width = max(1, min(width, round(height * 4 / 3)))
    box_height = max(1, min(height, round(width * 4 / 3)))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height


def ready_window(ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 [CONTEXT], of a window of one token more."""
    long = torch.from_numpy(ids.astype(np.int64))
    return long[:-1], long[1:]
