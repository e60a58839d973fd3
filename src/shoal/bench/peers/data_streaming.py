"""MosaicML Streaming over MDS shards on the local disk: what one would write without Shoal."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from shoal.bench.peers.data_clock import Batch, Job, has_gpu, main
from shoal.bench.peers.data_samples import (
    CONTEXT,
    mixed_images,
    mixed_windows,
    ready_image,
    ready_window,
    shard_bytes,
)


def stand_in_for_torchvision() -> None:
    """Streaming imports two names of torchvision for datasets that are not read here; where it is not installed,
    because it must be built for the very torch beside it, empty ones do."""
    if importlib.util.find_spec("torchvision"):
        return
    importlib.import_module("transformers")  # asks whether torchvision is there, and is to hear that it is not
    names = {"torchvision.datasets": "VisionDataset", "torchvision.transforms.functional": "to_tensor"}
    for module in ("torchvision", "torchvision.transforms", *names):
        sys.modules[module] = ModuleType(module)
    for module, name in names.items():
        setattr(sys.modules[module], name, type(name, (), {}))


stand_in_for_torchvision()
from streaming import MDSWriter, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


def prepare(job: Job) -> None:
    """Shards with the bytes of the JPEGs as they are, or with windows of ids."""
    size = shard_bytes(job.source)
    if job.files == "images":
        with MDSWriter(out=str(job.own), columns={"image": "bytes", "label": "int"}, size_limit=size) as writer:
            for path, label in mixed_images(job.source):
                writer.write({"image": path.read_bytes(), "label": label})
    else:
        with MDSWriter(out=str(job.own), columns={"ids": f"ndarray:uint16:{CONTEXT + 1}"}, size_limit=size) as writer:
            for window in mixed_windows(job.source):
                writer.write({"ids": window})


class Images(StreamingDataset):  # type: ignore[misc]
    """Samples that are decoded as they are read."""

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        return ready_image(sample["image"]), sample["label"]


class Windows(StreamingDataset):  # type: ignore[misc]
    """Windows of ids, made inputs and targets as they are read."""

    def __getitem__(self, at: Any) -> Any:
        return ready_window(super().__getitem__(at)["ids"])


def build(job: Job) -> Iterable[Batch]:
    """Shuffled by its default algorithm, in blocks of many shards."""
    kind = Images if job.files == "images" else Windows
    dataset = kind(local=str(job.own), shuffle=True, batch_size=job.batch)
    return DataLoader(dataset, batch_size=job.batch, num_workers=job.workers, pin_memory=has_gpu())


if __name__ == "__main__":
    try:
        main(build, prepare)
    finally:
        clean_stale_shared_memory()  # what a process that was killed has left
