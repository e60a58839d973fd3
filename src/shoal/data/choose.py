"""Which loader a dataset is read by, and the order that follows from it."""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shoal.core.errors import UserError
from shoal.data.dataset import MemoryDataset
from shoal.data.image_folder import ImageFolderDataset
from shoal.data.iterable import IterableRows
from shoal.data.order import Order
from shoal.data.ray_data import RayRows
from shoal.data.shards.sharded import ShardedRows
from shoal.data.shuffle import Windows
from shoal.data.tokens import TokenDataset
from shoal.data.windows import WindowDataset

Kind = Literal["memory", "map", "stream", "ray"]


@dataclass(frozen=True)
class Streaming:
    """How samples in files are shuffled."""

    window: int
    lanes: int


def choose_loader(asked: str, dataset: Any) -> Kind:
    """The loader that a recipe asks for, checked against the data; or what `auto` comes to."""
    is_ray = isinstance(dataset, RayRows)
    num_files = len(starts) - 1 if (starts := getattr(dataset, "starts", None)) is not None else 0
    if asked == "auto":
        if is_ray:
            return "ray"
        if isinstance(dataset, MemoryDataset | WindowDataset):
            return "memory"
        if isinstance(dataset, TokenDataset) and num_files == 1:
            return "memory"
        return "stream" if num_files else "map"
    what = type(dataset).__name__
    if is_ray and asked != "ray":
        raise UserError(f"data.loader: {asked} cannot read a Ray Dataset; leave it at auto, or set ray")
    if asked == "stream" and not num_files:
        raise UserError(
            f"data.loader: stream reads samples in files, which {what} has not; make shards of it with shoal data "
            "shard, or set map"
        )
    if asked == "memory" and not isinstance(dataset, MemoryDataset | WindowDataset | TokenDataset):
        raise UserError(f"data.loader: memory is for data that is in memory, and {what} is not; set map")
    if isinstance(dataset, IterableRows) and asked == "ray":
        raise UserError(f"data.loader: ray reads samples in any order, and {what} has but one; set map")
    return asked  # type: ignore[return-value]


def make_order(dataset: Any, kind: Kind, global_batch: int, seed: int, streaming: Streaming | None) -> Order:
    """The order of the samples of a run."""
    if kind == "stream":
        assert streaming is not None
        window, lanes = streaming.window, streaming.lanes
        if isinstance(dataset, ShardedRows):
            window, lanes = dataset.limits(window, lanes)
        windows = Windows(np.diff(dataset.starts), window, lanes)
        return Order(len(dataset), global_batch, seed, windows)
    is_shuffled = not isinstance(dataset, IterableRows | RayRows)
    return Order(len(dataset), global_batch, seed, is_shuffled=is_shuffled)


def files_hash(dataset: Any, order: Order) -> str | None:
    """Of all that the samples of a step depend on besides the recipe: files, their rows, window, lanes; None where
    samples are not in files that can be told apart."""
    if not isinstance(dataset, ShardedRows | TokenDataset | ImageFolderDataset):
        return order.windows_hash
    return hashlib.sha256(f"{order.windows_hash} {dataset.contents}".encode()).hexdigest()
