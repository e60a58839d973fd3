"""What a worker holds of a tensor: stretches and blocks cover it once, and only what is needed is read."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

from shoal.core.parts import (
    FlatPart,
    copy_own_part,
    is_distributed,
    local_place,
    read_block,
    read_flat,
    shape_of,
)
from shoal.core.process import Process

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


class InFiles(Mapping[str, torch.Tensor]):
    """Tensors that are read block by block, as those of a checkpoint are; counts what is read."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.num_read = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.block(name, (0,) * len(self.shapes[name]), self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def block(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        self.num_read += math.prod(shape)
        return self.tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).reshape(shape)


@given(shape=SHAPES, cuts=st.lists(st.integers(0, 700), max_size=6))
@example(shape=(3, 4, 5), cuts=[7, 7, 33])
@example(shape=(), cuts=[1])
@example(shape=(2, 0), cuts=[])
def test_stretches_as_blocks_cover_the_whole_once(shape, cuts):
    whole = numbered(shape)
    edges = [0, *sorted(min(cut, whole.numel()) for cut in cuts), whole.numel()]
    found, times = torch.full(shape, -1.0), torch.zeros(shape)
    for start, end in itertools.pairwise(edges):
        part = FlatPart(whole.reshape(-1)[start:end], start, shape)
        blocks = list(part.blocks())
        assert len(blocks) <= max(2 * len(shape) - 1, 1), "no more of them than the edges make"
        assert sum(block.numel() for block, _ in blocks) == end - start
        for block, offset in blocks:
            where = tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))
            found[where] = block
            times[where] += 1
            assert block.numel() == 0 or block.data_ptr() == part.flat.data_ptr() + 4 * int(block.flatten()[0] - start)
    assert torch.equal(found, whole) and bool((times == 1).all())


def test_of_a_tensor_without_elements_there_is_a_block_too():
    (found,) = FlatPart(torch.zeros(0), 0, (3, 0, 2)).blocks()
    assert found[0].shape == (3, 0, 2) and found[1] == (0, 0, 0)
    assert list(FlatPart(torch.zeros(0), 4, (2, 2)).blocks()) == [], "of others an empty stretch is nothing"


@given(shape=SHAPES, data=st.data())
@example(shape=(5, 4), data=None)
def test_a_stretch_is_read_and_no_more_rows_than_hold_it(shape, data):
    whole = numbered(shape)
    stretches = [(0, 0), (7, 6), (20, 0), (8, 4)]
    if data is not None:
        start = data.draw(st.integers(0, whole.numel()))
        stretches = [(start, data.draw(st.integers(0, whole.numel() - start)))]
    for start, count in stretches:
        in_files = InFiles({"a": whole})
        expected = whole.reshape(-1)[start : start + count]
        for tensors in ({"a": whole}, in_files):
            found = read_flat(tensors, "a", start, count)
            assert torch.equal(found, expected) and found.dtype == whole.dtype
        row = math.prod(shape[1:])
        touched = len({element // row for element in range(start, start + count)}) if row else 0
        assert in_files.num_read <= max(touched * row, 1)


def test_nothing_is_read_for_a_shape_or_for_an_empty_stretch():
    in_files = InFiles({"a": numbered((6, 4)), "scalar": torch.tensor(3.0)})
    assert (shape_of(in_files, "a"), shape_of(in_files, "scalar")) == ((6, 4), ())
    assert shape_of({"a": numbered((6, 4))}, "a") == (6, 4)
    for start in (0, 5, 24):
        assert read_flat(in_files, "a", start, 0).shape == (0,)
    assert in_files.num_read == 0
    assert float(read_flat(in_files, "scalar", 0, 1)) == 3.0 and read_flat(in_files, "scalar", 1, 0).numel() == 0
    assert torch.equal(read_block(in_files, "a", (2, 1), (3, 2)), numbered((6, 4))[2:5, 1:3])
    with pytest.raises(ValueError, match="zip"):
        read_block({"a": numbered((6, 4))}, "a", (2,), (3, 2))


def test_a_plain_tensor_is_filled_whole():
    assert not is_distributed(torch.zeros(2)) and not is_distributed(FlatPart(torch.zeros(1), 0, (1,)))
    for shape in ((), (3,), (0, 2), (2, 3)):
        target = torch.zeros(shape, dtype=torch.float64)
        copy_own_part(target, InFiles({"a": numbered(shape)}), "a")
        assert torch.equal(target, numbered(shape).double())


def fill_parts(process: Process, shape: tuple[int, ...]) -> list[tuple[torch.Tensor, bool, int, int]]:
    """Every way to divide it: what came together, whether it says where it is, elements here, elements read."""
    line = init_device_mesh("cpu", (process.world_size,))
    plane = init_device_mesh("cpu", (2, process.world_size // 2))
    ways = [(line, [Replicate()])]
    ways += [(line, [Shard(dimension)]) for dimension in range(len(shape))]
    for dimension in range(len(shape)):
        ways += [(plane, [Replicate(), Shard(dimension)]), (plane, [Shard(dimension), Replicate()])]
        ways += [(plane, [Shard(0), Shard(dimension)])]
    found = []
    for mesh, placements in ways:
        in_files = InFiles({"a": numbered(shape)})
        target = zeros(shape, device_mesh=mesh, placements=placements)
        copy_own_part(target, in_files, "a")
        assert is_distributed(target)
        offset, own_shape = local_place(target)
        where = tuple(slice(o, o + n) for o, n in zip(offset, own_shape, strict=True))
        local = target.to_local()
        says = tuple(local.shape) == own_shape and (local.numel() == 0 or torch.equal(local, numbered(shape)[where]))
        same = torch.equal(local, distribute_tensor(numbered(shape), mesh, placements).to_local())
        found.append((target.full_tensor(), says and same, local.numel(), in_files.num_read))
    return found


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 6), (5, 7), (2, 3, 5), (0, 3), (9, 1)], ids=str)
def test_a_worker_fills_its_part_however_it_is_divided_and_reads_no_more(ranks, shape):
    """Also where a dimension is smaller than the workers, so that some of them hold nothing."""
    for worker in ranks(4)(fill_parts, shape):
        for whole, says_where, num_held, num_read in worker:
            assert torch.equal(whole, numbered(shape))
            assert says_where
            assert num_read == num_held
