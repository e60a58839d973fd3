"""Most of this needs a GPU to be seen, and is skipped where there is none."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shoal.data.augment import ImageTransform
from shoal.data.device import DeviceFeed

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Pair(NamedTuple):
    first: Any
    second: Any


class Opaque:
    """Moves itself and does not say what is inside."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> "Opaque":
        return Opaque(self.tensor.to(device))


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def add_epoch(batch: tuple[torch.Tensor, ...], indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor + epoch + len(indices) for tensor in batch)


def keep_busy(num_cycles: int = 200_000_000) -> None:
    """About a tenth of a second of work on the current stream."""
    torch.cuda._sleep(num_cycles)


def test_on_a_cpu_a_batch_is_handed_through() -> None:
    feed = DeviceFeed(CPU)
    batch = {"inputs": torch.zeros(2), "name": "text"}
    sent = feed.send(batch, np.arange(2), 0)
    assert sent.ready is None and feed.receive(sent) is batch


def test_on_a_cpu_a_batch_is_transformed() -> None:
    feed = DeviceFeed(CPU, add_epoch)
    (out,) = feed.receive(feed.send((torch.zeros(3),), np.arange(3), 4))
    assert out.tolist() == [7, 7, 7]


def test_an_error_of_the_transform_comes_where_the_batch_is_sent() -> None:
    def fail(batch: Any, indices: np.ndarray, epoch: int) -> Any:
        raise ValueError("not like this")

    with pytest.raises(ValueError, match="not like this"):
        DeviceFeed(CPU, fail).send((torch.zeros(1),), np.arange(1), 0)


@needs_gpu
def test_nested_batches_arrive_whole() -> None:
    feed = DeviceFeed(gpu())
    batch = {"a": torch.arange(4).pin_memory(), "b": [Pair(torch.ones(2), "text"), 3]}
    out = feed.receive(feed.send(batch, np.arange(4), 0))
    assert out["a"].device == out["b"][0].first.device == gpu()
    assert out["a"].tolist() == [0, 1, 2, 3] and out["b"][0].second == "text" and out["b"][1] == 3


@needs_gpu
def test_sending_overlaps_with_the_computation_and_waits_for_nothing() -> None:
    transform = ImageTransform((0.5,) * 3, (0.5,) * 3, padding=2, flip=True)
    feed = DeviceFeed(gpu(), transform)
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8).pin_memory()
    labels = torch.arange(64).pin_memory()
    feed.receive(feed.send((images, labels), np.arange(64), 0))  # means are copied, memory is set apart
    torch.cuda.synchronize()
    keep_busy()
    computed = torch.cuda.Event()
    computed.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sent = feed.send((images, labels), np.arange(64), 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sent.ready is not None
    sent.ready.synchronize()
    assert not computed.query(), "the batch is there while the device still computes"
    out, out_labels = feed.receive(sent)
    expected, _ = transform((images, labels), np.arange(64), 1)
    assert torch.equal(out.cpu(), expected) and torch.equal(out_labels.cpu(), labels)


@needs_gpu
def test_who_receives_waits_for_the_transform() -> None:
    def slow(batch: tuple[torch.Tensor, ...], indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, ...]:
        keep_busy()
        return tuple(tensor + 1 for tensor in batch)

    feed = DeviceFeed(gpu(), slow)
    feed.send((torch.zeros(1000).pin_memory(),), np.arange(1), 0)  # loads the kernels, for which the host may wait
    torch.cuda.synchronize()
    sent = feed.send((torch.zeros(1000).pin_memory(),), np.arange(1), 0)
    (out,) = feed.receive(sent)
    assert sent.ready is not None and not sent.ready.query(), "the host goes on"
    assert (out * 2).sum().item() == 2000


@needs_gpu
def test_memory_is_not_used_again_while_a_batch_is_still_read() -> None:
    feed = DeviceFeed(gpu())
    size = 4 << 20
    sources = [torch.full((size,), float(number)).pin_memory() for number in range(4)]
    for source in sources:  # memory for as many as are on their way at once
        feed.receive(feed.send((source,), np.arange(1), 0))
    torch.cuda.synchronize()
    sums = []
    for source in sources:
        (out,) = feed.receive(feed.send((source,), np.arange(1), 0))
        keep_busy(20_000_000)
        sums.append(out.sum())
        del out  # the next copy must not go where this one is still to be read
    assert [total.item() for total in sums] == [number * size for number in range(4)]


@needs_gpu
def test_pinned_memory_may_be_let_go_of_at_once() -> None:
    feed = DeviceFeed(gpu())
    sent = []
    for number in range(8):
        source = torch.full((1 << 20,), float(number)).pin_memory()
        sent.append(feed.send((source,), np.arange(1), 0))
        del source
    means = [feed.receive(one)[0].mean().item() for one in sent]
    assert means == list(range(8))


@needs_gpu
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_is_on_the_device_or_hides_its_tensors_stays_on_the_current_stream(wrapped: bool) -> None:
    feed = DeviceFeed(gpu())
    keep_busy()
    tensor = torch.zeros(1000, device=gpu()) + 1  # not computed yet
    sent = feed.send({"a": Opaque(torch.ones(1000)) if wrapped else tensor}, np.arange(1), 0)
    assert sent.ready is None
    out = feed.receive(sent)["a"]
    assert (out.tensor if wrapped else out).sum().item() == 1000
