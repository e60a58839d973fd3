"""Memory that is used again, but never while anybody still has it."""

import gc
import threading

import numpy as np
import torch

from shoal.core.recycled import Recycled

SHAPE = (1024, 1024)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_what_was_let_go_of_comes_again() -> None:
    recycled = Recycled()
    first = recycled.empty(SHAPE, torch.float32)
    where = address(first)
    del first
    again = recycled.empty((2048, 512), torch.float32)
    assert address(again) == where and again.shape == (2048, 512) and again.dtype == torch.float32
    assert address(recycled.empty(SHAPE, torch.int32)) != where


def test_nothing_comes_again_while_anything_made_of_it_is_there() -> None:
    recycled = Recycled()

    def kept(make):
        tensor = recycled.empty(SHAPE, torch.float32)
        tensor.fill_(1.0)
        return make(tensor), address(tensor)

    makers = (
        lambda tensor: tensor[5:7, ::3],
        lambda tensor: tensor.view(-1)[:10].numpy(),
        lambda tensor: tensor.T.detach(),
        lambda tensor: np.asarray(tensor)[1:2, 1:2],
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
        lambda tensor: (torch.ones(1024, requires_grad=True) * tensor).sum(),  # which the graph holds on to
    )
    for make in makers:
        held, where = kept(make)
        gc.collect()
        others = [recycled.empty(SHAPE, torch.float32) for _ in range(6)]
        assert where not in map(address, others), "it is still in use"
        del held
        gc.collect()
        del others


def test_small_tensors_are_left_to_the_allocator() -> None:
    recycled = Recycled()
    recycled.empty((10,), torch.float32)
    assert not recycled._free


def test_no_more_is_kept_than_a_few() -> None:
    recycled = Recycled()
    held = [recycled.empty(SHAPE, torch.uint8) for _ in range(9)]
    held.clear()
    assert len(recycled._free[1 << 20]) == 4


def test_of_many_sizes_the_oldest_go() -> None:
    recycled = Recycled()
    for number in range(40):
        recycled.empty((1 << 25, 1 + number), torch.uint8)[0].fill_(0)
    assert sum(size * len(pieces) for size, pieces in recycled._free.items()) <= max(512 << 20, 40 << 25)


def test_by_many_threads() -> None:
    recycled, wrong = Recycled(), []

    def use(number: int) -> None:
        for _ in range(200):
            tensor = recycled.empty((1 << 20,), torch.uint8)
            tensor.fill_(number)
            if int(tensor[::4096].max()) != number or int(tensor[::4096].min()) != number:
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_it_is_memory_of_the_cpu_whatever_torch_makes_by_default() -> None:
    with torch.device("meta"):
        assert Recycled().empty((1 << 21,), torch.uint8).device.type == "cpu"
        assert Recycled().empty((1,), torch.uint8).device.type == "cpu"
