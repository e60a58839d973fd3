"""Torch's DataLoader over an image folder or a mapped file of tokens: what one would write without Shoal."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from shoal.bench.peers.data_clock import Job, has_gpu, main
from shoal.bench.peers.data_samples import list_images, ready_image, ready_window, windows


class Images(Dataset[tuple[torch.Tensor, int]]):
    """The images of a folder, one a sample."""

    def __init__(self, job: Job) -> None:
        self.images = list_images(job.source)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.images[index]
        return ready_image(path.read_bytes()), label


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The windows of a mapped file, one a sample."""

    def __init__(self, job: Job) -> None:
        self.windows = windows(job.source)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return ready_window(self.windows[index])


def build(job: Job) -> Any:
    """Shuffled over all samples."""
    dataset: Dataset[Any] = Images(job) if job.files == "images" else Windows(job)
    return DataLoader(dataset, batch_size=job.batch, shuffle=True, num_workers=job.workers, pin_memory=has_gpu())


if __name__ == "__main__":
    main(build)
