"""Images in one folder per class, decoded as they are needed."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from shoal.core.errors import UserError
from shoal.core.imports import require
from shoal.core.rng import sample_uniforms
from shoal.core.spec import DataSpec
from shoal.data.augment import normalize
from shoal.data.dataset import Datasets
from shoal.data.download import search_folders
from shoal.data.section import ImageFolder

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
RESIZE_RATIO = 256 / 224
"""Validation images are scaled so that the crop leaves this margin, as is usual for ImageNet."""
CROP_TRIES = 10
NUM_DRAWS = 2 * CROP_TRIES + 3
LAYOUT = "Lay the images out as {root}/train/CLASS/image.jpg and {root}/val/CLASS/image.jpg."

Box = tuple[int, int, int, int]
"""left, top, right, bottom"""


def load_image_folder(section: ImageFolder, seed: int) -> Datasets:
    """`train` and `val` under `dir`; the classes are the sorted names of the folders in `train`."""
    require("PIL", "data.name", "images")
    folders = search_folders(section.dir, section.name)
    root = next((folder for folder in folders if (folder / "train").is_dir()), None)
    if root is None or not (root / "val").is_dir():
        missing = "train" if root is None else "val"
        where = f"{folders[0]} (also looked in {folders[1]})" if root is None else str(root)
        layout = LAYOUT.format(root=root or folders[0])
        raise UserError(f"data.dir: no folder {missing!r} in {where}. {layout}")
    classes = list_classes(root / "train")
    unknown = sorted(set(list_classes(root / "val")) - set(classes))
    if unknown:
        raise UserError(
            f"data.dir: {root / 'val'} has classes that {root / 'train'} has not: {', '.join(unknown[:10])}; "
            "remove them or add images to train on"
        )
    return Datasets(
        train=ImageFolderDataset(root / "train", classes, section.size, seed if section.augment else None),
        val=ImageFolderDataset(root / "val", classes, section.size, None),
        spec=DataSpec(image_shape=(3, section.size, section.size), num_classes=len(classes)),
    )


def list_classes(folder: Path) -> list[str]:
    """The sorted names of the folders in `folder`, without hidden ones."""
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise UserError(f"data.dir: {folder} has no folders, one per class. {LAYOUT.format(root=folder.parent)}")
    return classes


def list_images(folder: Path) -> list[str]:
    """The sorted names of the image files in `folder`."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.lower().endswith(EXTENSIONS) and entry.is_file()]
    return sorted(name for name in names if not name.startswith("."))


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


def _centered(width: int, height: int, box_width: int, box_height: int) -> Box:
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height


class ImageFolderDataset:
    """Decodes, cuts and normalises the images of a batch; with a seed the cut is random, else the middle."""

    def __init__(self, folder: Path, classes: Sequence[str], size: int, augment_seed: int | None) -> None:
        self.folder = folder
        self.classes = list(classes)
        self.size = size
        self.augment_seed = augment_seed
        names: list[bytes] = []
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            images = list_images(folder / name) if (folder / name).is_dir() else []
            names.extend(os.fsencode(image) for image in images)
            labels.extend([label] * len(images))
        if not names:
            layout = LAYOUT.format(root=folder.parent)
            raise UserError(f"data.dir: {folder} holds no images ({', '.join(EXTENSIONS)}). {layout}")
        # Arrays, not lists: counting references to a million strings would copy them into every loader process.
        self.names = np.array(names, dtype=np.bytes_)
        self.labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> Path:
        """The file of a sample."""
        name: str = os.fsdecode(self.names[index])
        return self.folder / self.classes[int(self.labels[index])] / name

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images float32 [B, 3, size, size] and labels int64 [B]."""
        if self.augment_seed is None:
            pixels = [self._read(int(index), None) for index in indices]
        else:
            draws = sample_uniforms(self.augment_seed, epoch, indices, NUM_DRAWS)
            pixels = [self._read(int(index), draw) for index, draw in zip(indices, draws, strict=True)]
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
        return normalize(images, MEAN, STD), torch.from_numpy(self.labels[indices])

    def _read(self, index: int, draws: np.ndarray | None) -> np.ndarray:
        """Height x width x 3 bytes of one sample."""
        from PIL import Image

        path = self.path(index)
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except Exception as error:
            # Pillow's decoders raise many kinds of errors on damaged files.
            raise UserError(f"data.dir: {path}: cannot be decoded ({error}); replace the image or delete it") from error
        target = (self.size, self.size)
        if draws is not None:
            image = image.resize(target, Image.Resampling.BILINEAR, box=random_crop_box(*image.size, draws))
            if draws[-1] < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return np.asarray(image)
        scale = round(self.size * RESIZE_RATIO) / min(image.size)
        width, height = (max(self.size, round(side * scale)) for side in image.size)
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(resized.crop(_centered(width, height, *target)))
