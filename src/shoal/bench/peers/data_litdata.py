"""LitData over chunks that `optimize` wrote to the local disk: what one would write without Shoal."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from shoal.bench.peers.data_clock import Batch, Job, has_gpu, main
from shoal.bench.peers.data_samples import (
    CONTEXT,
    mixed_images,
    mixed_windows,
    ready_image,
    ready_window,
    shard_bytes,
)


def read_image(image: tuple[str, int]) -> dict[str, Any]:
    """A sample as it is written: the bytes of the JPEG as they are."""
    with open(image[0], "rb") as file:  # noqa: PTH123
        return {"image": file.read(), "label": image[1]}


def read_windows(job: Job, _: int) -> Any:
    """All windows, one after the other."""
    for window in mixed_windows(job.source):
        yield torch.from_numpy(np.array(window))


def prepare(job: Job) -> None:
    """Chunks of samples, or of tokens that its loader of tokens cuts into windows."""
    size = shard_bytes(job.source)
    if job.files == "images":
        images = [(str(path), label) for path, label in mixed_images(job.source)]
        optimize(read_image, images, str(job.own), chunk_bytes=size, num_workers=1, keep_data_ordered=True)
    else:
        length = CONTEXT + 1
        tokens = max(1, size // (2 * length)) * length
        optimize(
            partial(read_windows, job),
            [0],
            str(job.own),
            chunk_size=tokens,
            num_workers=1,
            item_loader=TokensLoader(block_size=length),
        )


class Images(StreamingDataset):  # type: ignore[misc]
    """Samples that are decoded as they are read."""

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return ready_image(sample["image"]), sample["label"]


class Windows(StreamingDataset):  # type: ignore[misc]
    """Windows of ids, made inputs and targets as they are read."""

    def __getitem__(self, index: Any) -> Any:
        return ready_window(super().__getitem__(index).numpy())


def build(job: Job) -> Iterable[Batch]:
    """Shuffled by its default: chunks, and samples within a chunk."""
    if job.files == "images":
        dataset = Images(str(job.own), shuffle=True)
    else:
        dataset = Windows(str(job.own), item_loader=TokensLoader(block_size=CONTEXT + 1), shuffle=True)
    loader: Iterable[Batch] = StreamingDataLoader(
        dataset, batch_size=job.batch, num_workers=job.workers, pin_memory=has_gpu()
    )
    return loader


if __name__ == "__main__":
    main(build, prepare)
