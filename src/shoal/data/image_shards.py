"""Images in shards: tar files as webdataset has them, or parquet."""

from typing import Any

import numpy as np
import torch

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.data.augment import ImageTransform
from shoal.data.classes import Classes, find_classes, label_column
from shoal.data.crops import MEAN, STD, Crops
from shoal.data.dataset import Datasets
from shoal.data.decode import CannotDecodeError
from shoal.data.section import ImageFolder
from shoal.data.shards.find import check_columns
from shoal.data.shards.index import ShardIndex
from shoal.data.shards.opened import RowError
from shoal.data.shards.sharded import ShardedRows
from shoal.data.shards.store import Store

Part = tuple[ShardIndex, Store]
_REMEDY = "replace it in what the shards were made of, and make them again"
_NAMES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff", "image", "img", "content")


def load_image_shards(section: ImageFolder, train: Part, val: Part | None, seed: int) -> Datasets:
    """Both parts, with the classes that the index of the training shards names."""
    parts = [train, *([val] if val is not None else [])]
    for index, store in parts:
        if index.format not in ("tar", "parquet", "folder"):
            raise UserError(f"data.dir: {store.where(0)} is {index.format}; images are in tar or parquet")
    column = label_column(section.label, train[0], "label" if train[0].format == "parquet" else "cls")
    if train[0].format != "folder":
        check_columns({"data.image": section.image, "data.label": column}, parts)
    classes = find_classes(column, train[0], val[0] if val is not None else None, section.classes)
    num_classes = classes.count
    crops = Crops(section.size, seed if section.augment else None)
    mixing = ImageTransform(MEAN, STD, seed, mixup=section.mixup, cutmix=section.cutmix, num_classes=num_classes)
    middle = Crops(section.size, None)
    return Datasets(
        train=ImageShards(*train, section.image, classes, crops, mixing),
        val=ImageShards(*val, section.image, classes, middle, ImageTransform(MEAN, STD)) if val is not None else None,
        spec=DataSpec(image_shape=(3, section.size, section.size), num_classes=num_classes),
    )


class ImageShards(ShardedRows):
    """Decodes and cuts the images of a batch."""

    def __init__(
        self,
        index: ShardIndex,
        store: Store,
        image_column: str | None,
        classes: Classes,
        crops: Crops,
        transform: ImageTransform,
    ) -> None:
        super().__init__(index, store)
        self.image_column = image_column
        self.classes = classes
        self.crops = crops
        self.batch_transform = transform

    def raw(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images uint8 [B, 3, size, size] and labels int64 [B]."""
        images = self.crops.empty(len(indices))
        draws = self.crops.draws(indices, epoch)

        def made(row: dict[str, Any], place: int) -> int:
            label = self._label(row)
            content = _content(row, self.image_column)
            try:
                self.crops.cut(content, draws[place], images[place])
            except CannotDecodeError as error:
                remedy = None if self.index.format == "folder" else _REMEDY
                raise RowError(f"the image cannot be decoded ({error})", remedy) from error
            return label

        labels = self.rows(indices, made)
        return images, torch.tensor(labels)

    def _label(self, row: dict[str, Any]) -> int:
        if self.index.format != "folder":
            return self.classes.of(row)
        if row["folder"] not in self.classes.names:
            raise RowError(f"is in the folder {row['folder']}, which is no class")
        return self.classes.names[row["folder"]]

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images float32 [B, 3, size, size] and labels."""
        return self.batch_transform(self.raw(indices, epoch), indices, epoch)


def _content(row: dict[str, Any], column: str | None) -> bytes:
    name = column if column is not None else next((name for name in _NAMES if name in row), None)
    if name is None or row.get(name) is None:
        columns = ", ".join(map(str, row)) or "none"
        remedy = "set data.image to that of the image"
        raise RowError(f"has no column {name or 'with an image'}; its columns: {columns}", remedy)
    content = row[name]
    if isinstance(content, dict):  # as Hugging Face stores images in parquet
        content = content.get("bytes")
    if not isinstance(content, bytes):
        raise RowError(f"column {name} is a {type(content).__name__}, not the bytes of an image")
    return content
