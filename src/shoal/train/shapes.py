"""What a batch of a recipe's data looks like: from the recipe where that tells, else from a few samples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_is_leaf, tree_map

from shoal.core.section import Section
from shoal.core.spec import DataSpec
from shoal.data import section as sections
from shoal.data.dataset import Datasets, reads_batches
from shoal.data.read import read_items
from shoal.data.shards.find import is_remote, local_folders
from shoal.data.shards.index import INDEX, parse_index
from shoal.data.tokens import VOCAB_SIZE

_KNOWN_IMAGES = {"mnist": (1, 28, 28), "fashion_mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


@dataclass(frozen=True)
class Shapes:
    """What a model is sized by, and batches of any size."""

    spec: DataSpec
    make: Callable[[int], Any]
    """A batch of so many samples."""


def known_shapes(section: Section | None) -> Shapes | None:
    """What a recipe alone says of its data; None where one must look at it."""
    if isinstance(section, sections.Synthetic):
        channels, height, width = section.shape
        return _images((channels, height, width), section.classes)
    if isinstance(section, sections.Mnist | sections.Cifar10):
        return _images(_KNOWN_IMAGES[section.name], 10)
    if isinstance(section, sections.Tokens):
        return _running_text(section.vocab_size or _told_vocab_size(section), section.context)
    return None


def _told_vocab_size(section: sections.Tokens) -> int:
    """As the index of shards on this machine says, if there is one."""
    for folder in [] if is_remote(section.dir) else local_folders(section):
        if (path := folder / "train" / INDEX).is_file():
            told = parse_index(path.read_bytes(), str(path)).about.get("vocab_size")
            return int(told or VOCAB_SIZE)
    return VOCAB_SIZE


def shapes_of(datasets: Datasets, section: Section | None, seed: int) -> Shapes:
    """What some samples of the training data look like."""
    dataset = datasets.train
    indices = np.arange(3) % len(dataset)

    def read(count: int) -> Any:
        if reads_batches(dataset):
            return dataset.batch(indices[:count], 0)
        return read_items(dataset, indices[:count], 0, seed)

    two, three = read(2), read(3)
    if isinstance(section, sections.CsvText):  # a batch is as long as its longest text
        two, three = (_at_full_length(batch, section.max_tokens) for batch in (two, three))
    return Shapes(datasets.spec, lambda count: _resized(two, three, count))


def _images(shape: tuple[int, int, int], num_classes: int) -> Shapes:
    def make(count: int) -> Any:
        return torch.zeros(count, *shape), torch.zeros(count, dtype=torch.int64)

    return Shapes(DataSpec(image_shape=shape, num_classes=num_classes), make)


def _running_text(vocab_size: int, context: int) -> Shapes:
    def make(count: int) -> Any:
        return tuple(torch.zeros(count, context, dtype=torch.int64) for _ in range(2))

    return Shapes(DataSpec(vocab_size=vocab_size, context=context), make)


def _at_full_length(batch: Any, max_tokens: int) -> Any:
    tokens, labels = batch
    return tokens.new_ones(len(tokens), max_tokens), labels


def _resized(two: Any, three: Any, count: int) -> Any:
    """From a batch of two samples and one of three, one of `count` samples."""
    if isinstance(two, torch.Tensor) and isinstance(three, torch.Tensor):
        return _resized_tensor(two, three, count)
    if isinstance(two, list | tuple) and isinstance(three, list | tuple) and len(two) != len(three):
        # A thing for each sample, names say; where there is another number of them, who knows.
        is_by_sample = (len(two), len(three)) == (2, 3)
        return type(two)(two[number % 2] for number in range(count)) if is_by_sample else two
    if tree_is_leaf(two):
        return two
    return tree_map(lambda a, b: _resized(a, b, count), two, three, is_leaf=lambda node: node is not two)


def _resized_tensor(two: torch.Tensor, three: torch.Tensor, count: int) -> torch.Tensor:
    if two.ndim != three.ndim:
        return two
    if two.shape[:1] == (2,) and three.shape[:1] == (3,) and two.shape[1:] == three.shape[1:]:
        return two[torch.arange(count) % 2]
    shape = [
        of_two + (count - 2) * (of_three - of_two) for of_two, of_three in zip(two.shape, three.shape, strict=True)
    ]
    return two.new_zeros([max(size, 1) for size in shape])
