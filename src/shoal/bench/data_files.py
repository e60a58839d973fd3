"""Files to read in `shoal bench data --files`: JPEGs that compress like photographs, or a long file of token ids."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench.peers.data_samples import CONTEXT, IDS_FILE, IMAGE_FOLDER, VOCAB_SIZE
from shoal.core.imports import require
from shoal.core.machine import usable_cores

NUM_CLASSES = 10
_QUALITY = 85
_SEED = 7
_OCTAVES = 7
_PIECE = 2**22
"""Tokens that are made at once."""


def make_files(files: str, folder: Path, samples: int) -> None:
    """Write `samples` images or windows below `folder`."""
    if files == "images":
        make_images(folder, samples)
    else:
        make_tokens(folder, samples)


def make_images(folder: Path, samples: int) -> None:
    """An image folder; about 40 kB an image. Besides, one image a class to validate on, as Shoal wants it."""
    require("PIL", "--files", "images")
    for part in (IMAGE_FOLDER, "val"):
        for label in range(NUM_CLASSES):
            (folder / part / f"class{label}").mkdir(parents=True)

    def write(number: int) -> None:
        part = IMAGE_FOLDER if number < samples else "val"
        path = folder / part / f"class{number % NUM_CLASSES}" / f"{number:07}.jpg"
        photograph_like(number).save(path, quality=_QUALITY, subsampling="4:2:0")

    with ThreadPoolExecutor(usable_cores()) as threads:  # NumPy and Pillow compute outside of the interpreter's lock
        for _ in threads.map(write, range(samples + NUM_CLASSES)):
            pass


def photograph_like(number: int) -> Any:
    """An image whose detail falls with its frequency, as in photographs, with grain in some places and colour that
    changes slowly; 400 to 600 by 350 to 450 pixels, one of four upright."""
    from PIL import Image

    draw = np.random.default_rng([_SEED, number])
    width, height = int(draw.integers(400, 601)), int(draw.integers(350, 451))
    if number % 4 == 3:
        width, height = height, width

    def smooth(cells: int) -> np.ndarray:
        noise = draw.standard_normal((max(2, round(cells * height / width)), cells), dtype=np.float32)
        return np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))

    light = 128 + sum(42 * 0.62**octave * smooth(3 * 2**octave) for octave in range(_OCTAVES))
    light += 28 * smooth(6).clip(0) * smooth(width // 2)
    colours = [128 + 14 * smooth(4) + 4 * smooth(24) for _ in range(2)]
    planes = [Image.fromarray(plane.clip(0, 255).astype(np.uint8)) for plane in (light, *colours)]
    return Image.merge("YCbCr", planes)


def make_tokens(folder: Path, samples: int) -> None:
    """A random walk over the ids of a vocabulary of GPT-2's size, long enough for `samples` windows."""
    draw = np.random.default_rng(_SEED)
    left, last = samples * CONTEXT + 1, 0
    folder.mkdir(parents=True)
    with (folder / IDS_FILE).open("wb") as file:
        while left:
            steps = draw.integers(-500, 501, min(left, _PIECE))
            ids = (last + np.cumsum(steps)) % VOCAB_SIZE
            file.write(ids.astype("<u2").tobytes())
            left, last = left - len(ids), int(ids[-1])
    (ids[: CONTEXT + 1] * 0).astype("<u2").tofile(folder / "val.bin")


def read_through(folder: Path) -> int:
    """Read every file once, so that all contenders find theirs in the page cache; how many bytes there are."""
    total, piece = 0, bytearray(2**22)
    for root, _, names in os.walk(folder):
        for name in names:
            with Path(root, name).open("rb", buffering=0) as file:
                while count := file.readinto(piece):
                    total += count
    return total
