"""CIFAR-10 as it is published: the binary version, or the Python version read without trusting its pickles."""

import io
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.core.spec import DataSpec
from shoal.data.augment import ImageTransform
from shoal.data.dataset import Datasets, MemoryDataset
from shoal.data.download import DownloadError, PublicFile, fetch_archive, find_file, not_found, search_folders
from shoal.data.files import broken_file, read_content
from shoal.data.section import Cifar10

ARCHIVE = PublicFile(
    name="cifar-10-binary.tar.gz",
    checksum="md5:c32a1d4ab5d03f1284b67883e8d87530",
    urls=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
BINARY_FOLDER = "cifar-10-batches-bin"
PICKLE_FOLDER = "cifar-10-batches-py"
BINARY_FILES = tuple(f"{BINARY_FOLDER}/{name}.bin" for name in BATCHES)
PICKLE_FILES = tuple(f"{PICKLE_FOLDER}/{name}" for name in BATCHES)

NUM_CLASSES = 10
IMAGE_SHAPE = (3, 32, 32)
IMAGE_BYTES = 3072
RECORD_BYTES = 1 + IMAGE_BYTES
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CROP_PADDING = 4

Records = tuple[np.ndarray, np.ndarray]
"""Images uint8 [N, 3, 32, 32] and labels int64 [N]."""


def load_cifar10(section: Cifar10, seed: int) -> Datasets:
    """The images stay uint8 in memory; a batch is augmented if asked for, and normalised, when it is read."""
    batches = _read_batches(section)
    train_images = np.concatenate([images for images, _ in batches[:-1]])
    train_labels = np.concatenate([labels for _, labels in batches[:-1]])
    val_images, val_labels = batches[-1]
    transform = ImageTransform(MEAN, STD)
    augment = ImageTransform(MEAN, STD, seed, padding=CROP_PADDING, flip=True)
    return Datasets(
        train=MemoryDataset(
            torch.from_numpy(train_images),
            torch.from_numpy(train_labels),
            transform=augment if section.augment else transform,
        ),
        val=MemoryDataset(torch.from_numpy(val_images), torch.from_numpy(val_labels), transform=transform),
        spec=DataSpec(image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES),
    )


def parse_binary_batch(content: bytes, path: Path, can_download: bool = False) -> Records:
    """Records of one label byte and 3,072 pixels, from a file of the binary version."""
    if not content or len(content) % RECORD_BYTES:
        problem = f"{len(content):,} bytes is not a whole number of records of {RECORD_BYTES:,} bytes"
        raise broken_file(path, problem, can_download)
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD_BYTES)
    return _checked(records[:, 1:], records[:, 0].astype(np.int64), path, can_download)


def parse_pickle_batch(content: bytes, path: Path, can_download: bool = False) -> Records:
    """Records from a file of the Python version; a pickle that names anything but NumPy's arrays is refused."""
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise broken_file(path, f"is not a CIFAR-10 batch ({error})", can_download) from error
    except Exception as error:
        # A damaged pickle fails in whatever way its bytes happen to lead to.
        problem = f"is not a CIFAR-10 batch ({type(error).__name__}: {error})"
        raise broken_file(path, problem, can_download) from error
    data = batch.get(b"data") if isinstance(batch, dict) else None
    labels = batch.get(b"labels") if isinstance(batch, dict) else None
    images = data.pixels() if isinstance(data, _PickledArray) else None
    if (
        images is None
        or not isinstance(labels, list)
        or not len(labels) == len(images) > 0
        or not all(type(label) is int for label in labels)
    ):
        problem = "does not hold images [N, 3072] under b'data' and as many labels under b'labels'"
        raise broken_file(path, problem, can_download)
    return _checked(images, np.array(labels, dtype=np.int64), path, can_download)


class _Pickled:
    """Stands in for what a pickle asks NumPy to make: keeps the arguments and the state, does nothing with them."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _PickledArray(_Pickled):
    """Stands in for an array; its state is (version, shape, type, column order, bytes)."""

    def pixels(self) -> np.ndarray | None:
        """The array, if it is one of bytes [N, 3072] in row order."""
        match self.state:
            case (_, (int(rows), 3072), _Pickled(arguments=(b"u1" | "u1", *_)), False | 0, bytes(content)):
                if len(content) == rows * IMAGE_BYTES:
                    return np.frombuffer(content, np.uint8).reshape(rows, IMAGE_BYTES)
        return None


class _ArrayUnpickler(pickle.Unpickler):
    """Builds dicts, lists, bytes, numbers and descriptions of arrays; any other name is refused, not imported.

    Not even NumPy's own functions run: they trust the state that a pickle hands them.
    """

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
            ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
            ("numpy", "ndarray"): _Pickled,
            ("numpy", "dtype"): _Pickled,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no such file does: not opened")
        return allowed[module, name]


def _checked(images: np.ndarray, labels: np.ndarray, path: Path, can_download: bool) -> Records:
    wrong = (labels < 0) | (labels >= NUM_CLASSES)
    if wrong.any():
        position = int(wrong.argmax())
        problem = f"label {labels[position]} of image {position} is not in 0..{NUM_CLASSES - 1}"
        raise broken_file(path, problem, can_download)
    # Copied: torch wants memory that it may write to.
    return np.array(images, order="C").reshape(-1, *IMAGE_SHAPE), labels


def _read_batches(section: Cifar10) -> list[Records]:
    folders = search_folders(section.dir, section.name)
    found = _find_batches(folders)
    if found is None:
        archive = find_file(folders, [ARCHIVE.name])
        if archive is not None:
            return _read_archive(archive, section.download)
        missing = _first_missing(folders)
        if not section.download:
            raise not_found(missing, folders, url=ARCHIVE.urls[0])
        try:
            fetch_archive(ARCHIVE, folders[1], BINARY_FILES)
        except DownloadError as error:
            raise not_found(missing, folders, url=ARCHIVE.urls[0], reason=str(error)) from error
        found = [folders[1] / name for name in BINARY_FILES]
    parse = parse_binary_batch if found[0].suffix == ".bin" else parse_pickle_batch
    return [parse(read_content(path, section.download), path, section.download) for path in found]


def _find_batches(folders: list[Path]) -> list[Path] | None:
    """The six files of the first folder that has all of them; `dir` may also be the folder of the batches itself."""
    bare = [tuple(Path(name).name for name in names) for names in (BINARY_FILES, PICKLE_FILES)]
    for folder in folders:
        for names in (BINARY_FILES, PICKLE_FILES, *bare):
            if all(find_file([folder], [name]) for name in names):
                return [folder / name for name in names]
    return None


def _first_missing(folders: list[Path]) -> str:
    """The name for the error message: where a version is partly there, its first missing file."""
    for names in (BINARY_FILES, PICKLE_FILES):
        for folder in folders:
            missing = [name for name in names if not find_file([folder], [name])]
            if 0 < len(missing) < len(names):
                return missing[0]
    return BINARY_FILES[0]


def _read_archive(path: Path, can_download: bool) -> list[Records]:
    """Batches straight from an archive that the user put there: its folder may be read-only."""
    try:
        with tarfile.open(path) as tar:
            contents = []
            for name in BINARY_FILES:
                member = tar.extractfile(name)
                contents.append(b"" if member is None else member.read())
    except (tarfile.TarError, EOFError, OSError, KeyError, zlib.error) as error:
        raise broken_file(path, f"is not the whole archive ({error})", can_download) from error
    return [parse_binary_batch(content, path / name) for content, name in zip(contents, BINARY_FILES, strict=True)]
