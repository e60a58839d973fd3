"""Images in shards: tar files as webdataset has them, or parquet."""

from typing import Any

import numpy as np
import torch

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.data.augment import ImageTransform
from shoal.data.crops import MEAN, STD, Crops
from shoal.data.dataset import Datasets
from shoal.data.decode import CannotDecodeError
from shoal.data.section import ImageFolder
from shoal.data.shards.index import ShardIndex
from shoal.data.shards.opened import RowError
from shoal.data.shards.sharded import ShardedRows
from shoal.data.shards.store import Store

Part = tuple[ShardIndex, Store]
_NAMES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff", "image", "img", "content")


def load_image_shards(section: ImageFolder, train: Part, val: Part | None, seed: int) -> Datasets:
    """Both parts, with the classes that the index of the training shards names."""
    for index, store in (train, *([val] if val is not None else [])):
        if index.format not in ("tar", "parquet", "folder"):
            raise UserError(f"data.dir: {store.where(0)} is {index.format}; images are in tar or parquet")
    num_classes = count_classes(section.classes, train[0], val[0] if val is not None else None)
    columns = (section.image, section.label)
    crops = Crops(section.size, seed if section.augment else None)
    mixing = ImageTransform(MEAN, STD, seed, mixup=section.mixup, cutmix=section.cutmix, num_classes=num_classes)
    middle = Crops(section.size, None)
    return Datasets(
        train=ImageShards(*train, columns, num_classes, crops, mixing),
        val=ImageShards(*val, columns, num_classes, middle, ImageTransform(MEAN, STD)) if val is not None else None,
        spec=DataSpec(image_shape=(3, section.size, section.size), num_classes=num_classes),
    )


def count_classes(given: int | None, train: ShardIndex, val: ShardIndex | None) -> int:
    """The number of classes, as the recipe or the index of the shards says."""
    classes = train.about.get("classes")
    if val is not None and classes is not None and val.about.get("classes") not in (None, classes):
        raise UserError("data.dir: the shards in val have other classes than those in train; shard both together")
    if classes is None and given is None:
        raise UserError(
            "data.classes: is required, because the index of the shards names no classes, for example data.classes=1000"
        )
    are_numbers = classes == [str(number) for number in range(len(classes or ()))]
    has_room = are_numbers and given is not None and given > len(classes or ())  # for those that no row here has
    if classes is not None and given is not None and given != len(classes) and not has_room:
        raise UserError(
            f"data.classes: {given} is not the number of classes in the index, {len(classes)}; leave it out"
        )
    return given or len(classes or ())


class ImageShards(ShardedRows):
    """Decodes and cuts the images of a batch."""

    def __init__(
        self,
        index: ShardIndex,
        store: Store,
        columns: tuple[str | None, str],
        num_classes: int,
        crops: Crops,
        transform: ImageTransform,
    ) -> None:
        super().__init__(index, store)
        self.image_column, self.label_column = columns
        self.num_classes = num_classes
        self._by_name = {name: number for number, name in enumerate(index.about.get("classes") or ())}
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
                raise RowError(f"the image cannot be decoded ({error})") from error
            return label

        labels = self.rows(indices, made)
        return images, torch.tensor(labels)

    def _label(self, row: dict[str, Any]) -> int:
        if self.index.format != "folder":
            value = row.get(self.label_column)
            if self.index.format == "parquet" and isinstance(value, str) and value in self._by_name:
                return self._by_name[value]
            return _label(row, self.label_column, self.num_classes)
        if row["folder"] not in self._by_name:
            raise RowError(f"is in the folder {row['folder']}, which is no class")
        return self._by_name[row["folder"]]

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images float32 [B, 3, size, size] and labels."""
        return self.batch_transform(self.raw(indices, epoch), indices, epoch)


def _content(row: dict[str, Any], column: str | None) -> bytes:
    name = column if column is not None else next((name for name in _NAMES if name in row), None)
    if name is None or row.get(name) is None:
        raise RowError(f"has no column {name or 'with an image'}; its columns: {', '.join(map(str, row)) or 'none'}")
    content = row[name]
    if isinstance(content, dict):  # as Hugging Face stores images in parquet
        content = content.get("bytes")
    if not isinstance(content, bytes):
        raise RowError(f"column {name} is a {type(content).__name__}, not the bytes of an image")
    return content


def _label(row: dict[str, Any], column: str, num_classes: int) -> int:
    value = row.get(column)
    if value is None:
        raise RowError(f"has no column {column}; its columns: {', '.join(map(str, row)) or 'none'}")
    try:
        label = int(value)
    except (TypeError, ValueError, OverflowError):
        raise RowError(f"column {column} is {value!r}, not the number of a class") from None
    if not 0 <= label < num_classes:
        raise RowError(f"class {label} is not below {num_classes}")
    return label
