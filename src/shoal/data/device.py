"""Batches on their way to the device while it still computes on the ones before."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.core.move import leaves, move
from shoal.data.dataset import Batch, BatchTransform


@dataclass(frozen=True)
class Sent:
    """A batch that is on its way."""

    batch: Batch
    ready: torch.cuda.Event | None = None
    """Comes when it has arrived and is transformed; None where there is nothing to wait for. Memory that a batch was
    sent from may be written to after `ready.synchronize()`; pinned memory of torch's own may be let go of at once."""


class DeviceFeed:
    """Copies batches to the device, and transforms them there, on a stream of its own beside the computation.

    Send a batch some steps before it is received. What is sent from pinned memory overlaps with the computation; other
    memory works too, but the host waits for the copy. On a CPU a batch is transformed where it is.
    """

    def __init__(self, device: torch.device, transform: BatchTransform | None = None) -> None:
        self.device = device
        self.transform = transform
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: Batch, indices: np.ndarray, epoch: int) -> Sent:
        """Start the copy and the transform of a batch; nothing waits for the device."""
        if self.stream is None or not all(_can_go_aside(leaf) for leaf in leaves(batch)):
            return Sent(self._transformed(batch, indices, epoch))
        with torch.cuda.stream(self.stream):
            arrived = self._transformed(batch, indices, epoch)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self.stream)
        return Sent(arrived, ready)

    def receive(self, sent: Sent) -> Batch:
        """The batch, for use on the current stream, which waits for it; the host does not."""
        if sent.ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(sent.ready)
            for leaf in leaves(sent.batch):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    # Its memory is the side stream's, which would otherwise reuse it while this one still computes.
                    leaf.record_stream(current)
        return sent.batch

    def _transformed(self, batch: Batch, indices: np.ndarray, epoch: int) -> Batch:
        moved = batch if self.device.type == "cpu" else move(batch, self.device)
        return moved if self.transform is None else self.transform(moved, indices, epoch)


def _can_go_aside(leaf: Any) -> bool:
    """Not what is on the device already, where the current stream may still write it, nor what hides its tensors."""
    if isinstance(leaf, torch.Tensor):
        return leaf.device.type == "cpu" and leaf.layout == torch.strided
    return not hasattr(leaf, "to")
