"""Images in one folder per class, or in shards, decoded as they are needed."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from shoal.core.errors import NoDataError, UserError
from shoal.core.imports import require
from shoal.core.spec import DataSpec
from shoal.data.augment import ImageTransform
from shoal.data.bad_samples import BadSample, BadSampleError
from shoal.data.crops import MEAN, STD, Crops
from shoal.data.dataset import Datasets
from shoal.data.decode import CannotDecodeError
from shoal.data.download import search_folders
from shoal.data.image_shards import load_image_shards
from shoal.data.section import ImageFolder
from shoal.data.shards.find import find_shards, is_remote
from shoal.data.shards.source import IMAGES

LAYOUT = "Lay the images out as {root}/train/CLASS/image.jpg and {root}/val/CLASS/image.jpg."


def load_image_folder(section: ImageFolder, seed: int) -> Datasets:
    """`train` and `val` under `dir`; the classes are the sorted names of the folders in `train`."""
    require("PIL", "data.name", "images")
    parts = {part: find_shards(section, part) for part in ("train", "val")}
    if parts["train"] is not None:
        return load_image_shards(section, parts["train"], parts["val"], seed)
    if is_remote(section.dir):
        raise NoDataError(
            f"data.dir: neither shards nor folders of images in {section.dir}/train; make shards: "
            f"shoal data shard FOLDER {section.dir}"
        )
    folders = search_folders(section.dir.removeprefix("file://"), section.name)
    root = next((folder for folder in folders if (folder / "train").is_dir()), None)
    if root is None or not (root / "val").is_dir():
        missing = "train" if root is None else "val"
        where = f"{folders[0]} (also looked in {folders[1]})" if root is None else str(root)
        layout = LAYOUT.format(root=root or folders[0])
        raise NoDataError(f"data.dir: no folder {missing!r} in {where}. {layout}")
    classes = list_classes(root / "train")
    unknown = sorted(set(list_classes(root / "val")) - set(classes))
    if unknown:
        raise UserError(
            f"data.dir: {root / 'val'} has classes that {root / 'train'} has not: {', '.join(unknown[:10])}; "
            "remove them or add images to train on"
        )
    mixing = ImageTransform(MEAN, STD, seed, mixup=section.mixup, cutmix=section.cutmix, num_classes=len(classes))
    crops = Crops(section.size, seed if section.augment else None)
    return Datasets(
        train=ImageFolderDataset(root / "train", classes, crops, mixing),
        val=ImageFolderDataset(root / "val", classes, Crops(section.size, None), ImageTransform(MEAN, STD)),
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
        names = [entry.name for entry in entries if entry.name.lower().endswith(IMAGES) and entry.is_file()]
    return sorted(name for name in names if not name.startswith("."))


class ImageFolderDataset:
    """Reads, decodes and cuts the images of a batch."""

    def __init__(self, folder: Path, classes: Sequence[str], crops: Crops, transform: ImageTransform) -> None:
        self.folder = folder
        self.classes = list(classes)
        self.crops = crops
        self.batch_transform = transform
        names: list[bytes] = []
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            images = list_images(folder / name) if (folder / name).is_dir() else []
            names.extend(os.fsencode(image) for image in images)
            labels.extend([label] * len(images))
        if not names:
            layout = LAYOUT.format(root=folder.parent)
            raise UserError(f"data.dir: {folder} holds no images ({', '.join(IMAGES)}). {layout}")
        # Arrays, not lists: counting references to a million strings would copy them into every loader process.
        self.names = np.array(names, dtype=np.bytes_)
        self.labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def contents(self) -> str:
        """A hash of the names of all files, in their order, by class: what number a sample has depends on it."""
        found = hashlib.sha256("/".join(self.classes).encode(errors="surrogateescape"))
        found.update(self.labels.tobytes())
        found.update(self.names.tobytes())
        return found.hexdigest()

    def path(self, index: int) -> Path:
        """The file of a sample."""
        name: str = os.fsdecode(self.names[index])
        return self.folder / self.classes[int(self.labels[index])] / name

    def raw(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images uint8 [B, 3, size, size] and labels int64 [B]."""
        images = self.crops.empty(len(indices))
        draws = self.crops.draws(indices, epoch)
        bad: list[BadSample] = []
        for place, index in enumerate(indices.tolist()):
            path = self.path(index)
            try:
                self.crops.cut(path.read_bytes(), draws[place], images[place])
            except CannotDecodeError as error:
                bad.append(BadSample(index, str(path), f"cannot be decoded ({error})"))
            except OSError as error:
                bad.append(BadSample(index, str(path), f"cannot be read: {error.strerror}"))
        if bad:
            raise BadSampleError(bad, "replace the image or delete it")
        return images, torch.from_numpy(self.labels[indices])

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images float32 [B, 3, size, size] and labels."""
        return self.batch_transform(self.raw(indices, epoch), indices, epoch)
