"""Who writes what: together all of it, nobody the same, everybody about as much."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shoal.checkpoint.pieces import Division, Piece, pieces_to_write
from shoal.core.parts import FlatPart
from shoal.core.process import Process
from tests.checkpoint.states import cut_flat


def put_together(parts: list[list[Piece]], shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The whole tensors; how often each element was written is checked on the way."""
    whole = {name: torch.zeros(shape) for name, shape in shapes.items()}
    count = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for piece in (piece for part in parts for piece in part):
        where = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.block.shape, strict=True))
        assert piece.whole_shape == shapes[piece.name]
        whole[piece.name][where] = piece.block
        count[piece.name][where] += 1
    assert all(bool((times == 1).all()) for times in count.values())
    return whole


@given(
    sizes=st.lists(
        st.one_of(
            st.just(()), st.tuples(st.integers(0, 40)), st.tuples(st.integers(1, 900), st.sampled_from([1, 64, 1000]))
        ),
        max_size=12,
    ),
    world_size=st.integers(1, 7),
)
def test_all_workers_together_write_everything_once(sizes, world_size):
    tensors = {f"t{number}": torch.rand(size) for number, size in enumerate(sizes)}
    parts = [pieces_to_write(tensors, frozenset(), rank, world_size) for rank in range(world_size)]
    whole = put_together(parts, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    assert all(torch.equal(whole[name], tensor) for name, tensor in tensors.items())
    assert sorted(p.name for part in parts for p in part if p.block.numel() == 0) == sorted(
        name for name, tensor in tensors.items() if tensor.numel() == 0
    ), "also what is empty, once"


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_shares_are_about_equal_even_if_one_tensor_is_almost_all(world_size):
    tensors = {"large": torch.zeros(5000, 256), **{f"small{n}": torch.zeros(64) for n in range(50)}}
    sizes = [
        sum(piece.block.numel() for piece in pieces_to_write(tensors, frozenset(), rank, world_size))
        for rank in range(world_size)
    ]
    assert max(sizes) < 1.05 * sum(sizes) / world_size


def test_small_tensors_stay_whole_and_those_that_may_differ_are_rank_0s():
    tensors = {"a": torch.zeros(100), "b": torch.zeros(100), "mean": torch.zeros(3)}
    parts = [pieces_to_write(tensors, frozenset({"mean"}), rank, 2) for rank in range(2)]
    assert [[piece.name for piece in part] for part in parts] == [["mean", "a"], ["b"]]
    assert all(piece.is_whole for part in parts for piece in part)


@given(
    shapes=st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=4),
    world_size=st.integers(1, 5),
    data=st.data(),
)
def test_of_stretches_each_worker_writes_its_own_and_together_all(shapes, world_size, data):
    whole = {f"t{number}": torch.rand(shape) for number, shape in enumerate(shapes)}
    cuts = st.lists(st.integers(0, 1300), min_size=world_size - 1, max_size=world_size - 1)
    flat = {name: cut_flat(tensor, data.draw(cuts)) for name, tensor in whole.items()}
    plain = torch.rand(3000, 10)
    parts = []
    for rank in range(world_size):
        tensors = {"plain": plain, **{name: stretches[rank] for name, stretches in flat.items()}}
        parts.append(pieces_to_write(tensors, frozenset(), rank, world_size))
        own = {piece.name for piece in parts[-1]} - {"plain"}
        assert own == {name for name, stretches in flat.items() if stretches[rank].flat.numel()}
    shapes_by_name = {name: tuple(tensor.shape) for name, tensor in whole.items()} | {"plain": (3000, 10)}
    found = put_together(parts, shapes_by_name)
    assert all(torch.equal(found[name], tensor) for name, tensor in (whole | {"plain": plain}).items())


def test_a_division_of_stretches_is_found_out_again_where_they_lie_elsewhere():
    memory = torch.arange(40.0)
    division = Division(0, 1)
    first = division.pieces({"a": FlatPart(memory[:10], 3, (4, 5))}, frozenset())
    assert division.pieces({"a": FlatPart(memory[:10].detach(), 3, (4, 5))}, frozenset()) is first
    for changed in (
        FlatPart(memory[:10], 4, (4, 5)),
        FlatPart(memory[:10], 3, (5, 4)),
        FlatPart(memory[:9], 3, (4, 5)),
        FlatPart(memory[10:20], 3, (4, 5)),
        memory[:10],
    ):
        assert division.pieces({"a": changed}, frozenset()) is not first
        assert division.pieces({"a": FlatPart(memory[:10], 3, (4, 5))}, frozenset()) is not first


def distributed_pieces(process: Process, layout: str) -> list[Piece]:
    value = torch.arange(35.0 * 1001).reshape(35, 1001)
    if layout == "sharded":  # 35 rows do not divide by 4
        mesh, placements = init_device_mesh("cpu", (process.world_size,)), [Shard(0)]
    elif layout == "columns":
        mesh, placements = init_device_mesh("cpu", (process.world_size,)), [Shard(1)]
    else:
        mesh, placements = init_device_mesh("cpu", (2, process.world_size // 2)), [Replicate(), Shard(0)]
    tensors = {"w": distribute_tensor(value, mesh, placements), "plain": torch.arange(20_000.0)}
    tensors["few"] = distribute_tensor(torch.arange(2.0), mesh, placements if layout != "columns" else [Shard(0)])
    found = pieces_to_write(tensors, frozenset(), process.rank, process.world_size)
    return [Piece(piece.name, piece.block.clone(), piece.whole_shape, piece.offset) for piece in found]


@pytest.mark.parametrize("layout", ["sharded", "columns", "hybrid"])
def test_of_distributed_tensors_each_worker_writes_what_it_holds(ranks, layout):
    parts = ranks(4)(distributed_pieces, layout)
    whole = put_together(parts, {"w": (35, 1001), "plain": (20_000,), "few": (2,)})
    assert torch.equal(whole["w"], torch.arange(35.0 * 1001).reshape(35, 1001))
    assert torch.equal(whole["few"], torch.arange(2.0)) and torch.equal(whole["plain"], torch.arange(20_000.0))
    sizes = [sum(piece.block.numel() for piece in part) for part in parts]
    assert max(sizes) < 1.5 * sum(sizes) / 4, "copies of a part share the work"


def test_a_division_is_found_out_again_only_if_other_tensors_are_asked_for():
    division, tensors = Division(0, 1), {"a": torch.ones(4, 3), "b": torch.ones(2)}
    first = division.pieces(tensors, frozenset())
    tensors["a"].zero_()
    again = division.pieces({name: tensor.detach() for name, tensor in tensors.items()}, frozenset())
    assert again is first, "in the same memory"
    for changed in (
        {"a": torch.zeros(4, 3), "b": tensors["b"]},
        {"a": tensors["a"].view(3, 4), "b": tensors["b"]},
        {"a": tensors["a"].view(torch.int32), "b": tensors["b"]},
        {"c": tensors["a"], "b": tensors["b"]},
        {"a": tensors["a"].as_strided((4, 3), (1, 4)), "b": tensors["b"]},
        {"a": tensors["a"]},
    ):
        found = division.pieces(changed, frozenset())
        assert found is not first and {piece.name: piece.block for piece in found}.keys() == changed.keys()
        assert all(piece.block.data_ptr() == changed[piece.name].data_ptr() for piece in found)
