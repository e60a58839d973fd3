"""MNIST and Fashion-MNIST in the idx format they are published in, gzipped or not."""

from pathlib import Path

import numpy as np
import torch

from shoal.core.spec import DataSpec
from shoal.data.augment import ImageTransform
from shoal.data.dataset import Datasets, MemoryDataset
from shoal.data.download import PublicFile, find_or_fetch, search_folders
from shoal.data.files import broken_file, read_content
from shoal.data.section import Mnist

MIRRORS = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/",),
    "fashion_mnist": (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
}
CHECKSUMS = {
    "mnist": {
        "train-images-idx3-ubyte": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "md5:d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "md5:9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "md5:ec29112dd5afa0611ce80d1b7f02629c",
    },
    "fashion_mnist": {
        "train-images-idx3-ubyte": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "md5:25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "md5:bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "md5:bb300cfdad3c16e7a12a480ee83cd310",
    },
}
TORCHVISION_FOLDERS = {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw"}
MEAN_AND_STD = {"mnist": ((0.1307,), (0.3081,)), "fashion_mnist": ((0.2860,), (0.3530,))}
NUM_CLASSES = 10
SHIFT_PIXELS = 2
UNSIGNED_BYTE = 0x08


def load_mnist(section: Mnist, seed: int) -> Datasets:
    """The images stay uint8 in memory; a batch of them is normalised, and shifted if asked for, when it is read."""
    mean, std = MEAN_AND_STD[section.name]
    padding = SHIFT_PIXELS if section.augment else 0
    train_images, train_labels = _load_part(section, "train")
    val_images, val_labels = _load_part(section, "t10k", size=tuple(train_images.shape[2:]))
    return Datasets(
        train=MemoryDataset(train_images, train_labels, transform=ImageTransform(mean, std, seed, padding)),
        val=MemoryDataset(val_images, val_labels, transform=ImageTransform(mean, std)),
        spec=DataSpec(image_shape=(1, train_images.shape[2], train_images.shape[3]), num_classes=NUM_CLASSES),
    )


def read_idx(path: Path, num_dimensions: int, can_download: bool = False) -> np.ndarray:
    """The array of unsigned bytes in an idx file, after checking that the file is what its header says."""
    content = read_content(path, can_download)
    magic = bytes([0, 0, UNSIGNED_BYTE, num_dimensions])
    if content[:4] != magic:
        found = content[:4].hex()
        raise broken_file(
            path, f"is not the idx file it should be (starts with {found}, not {magic.hex()})", can_download
        )
    header_bytes = 4 + 4 * num_dimensions
    if len(content) < header_bytes:
        raise broken_file(path, "ends within the idx header", can_download)
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", num_dimensions, offset=4))
    # Python's integers: a damaged header may name sizes whose product does not fit in 64 bits.
    expected = 1
    for size in shape:
        expected *= size
    if expected == 0:
        raise broken_file(path, f"holds no data (shape {shape})", can_download)
    if len(content) - header_bytes != expected:
        raise broken_file(
            path,
            f"holds {len(content) - header_bytes:,} bytes of data where its header says {expected:,} (shape {shape})",
            can_download,
        )
    # Copied: torch wants memory that it may write to.
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape).copy()


def _load_part(section: Mnist, part: str, size: tuple[int, ...] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    images_path = _find(section, f"{part}-images-idx3-ubyte")
    labels_path = _find(section, f"{part}-labels-idx1-ubyte")
    images = read_idx(images_path, 3, section.download)
    labels = read_idx(labels_path, 1, section.download)
    if size is not None and images.shape[1:] != size:
        problem = f"images are {images.shape[1:]} pixels, those to train on are {size}"
        raise broken_file(images_path, problem, section.download)
    if len(images) != len(labels):
        problem = f"holds {len(labels):,} labels for the {len(images):,} images of {images_path}"
        raise broken_file(labels_path, problem, section.download)
    if labels.max() >= NUM_CLASSES:
        position = int((labels >= NUM_CLASSES).argmax())
        problem = f"label {labels[position]} of image {position} is not in 0..{NUM_CLASSES - 1}"
        raise broken_file(labels_path, problem, section.download)
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))


def _find(section: Mnist, name: str) -> Path:
    public = PublicFile(
        name=f"{name}.gz",
        checksum=CHECKSUMS[section.name][name],
        urls=tuple(f"{mirror}{name}.gz" for mirror in MIRRORS[section.name]),
    )
    folders = search_folders(section.dir, section.name, TORCHVISION_FOLDERS[section.name])
    return find_or_fetch(folders, (name, f"{name}.gz"), public, section.download)
