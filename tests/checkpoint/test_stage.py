"""States are copied as they go into a file, into memory that is used again."""

import json

import pytest
import torch
from safetensors.torch import load

from shoal.checkpoint.pieces import Piece, pieces_to_write
from shoal.checkpoint.stage import PLACES, Stage
from shoal.core.errors import UserError
from shoal.core.parts import FlatPart
from tests.checkpoint.states import CPU, tensors_of


def as_file(staged) -> bytes:
    return staged.header + bytes(staged.data.numpy())


def pieces(value: float) -> list[Piece]:
    return pieces_to_write(tensors_of(value), frozenset(), 0, 1)


def test_what_is_staged_is_a_safetensors_file():
    tensors = tensors_of(3.0)
    loaded = load(as_file(Stage(CPU).take(pieces(3.0))))
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_the_original_may_change_and_the_memory_is_the_same_every_time():
    tensor, stage = torch.ones(1000), Stage(CPU)
    first = stage.take([Piece("a", tensor, (1000,), (0,))])
    tensor.zero_()
    assert float(first.tensors["a"][0].sum()) == 1000
    where = first.data.data_ptr()
    assert stage.take([Piece("a", tensor, (1000,), (0,))]).data.data_ptr() == where
    assert stage.take([Piece("a", tensor[:10], (10,), (0,))]).data.data_ptr() == where
    assert float(stage.take([Piece("a", torch.ones(5000), (5000,), (0,))]).tensors["a"][0].sum()) == 5000


def test_a_part_says_where_it_belongs():
    staged = Stage(CPU).take([Piece("a", torch.ones(2, 3), (8, 3), (4, 0)), Piece("b", torch.ones(2), (2,), (0,))])
    header = json.loads(staged.header[8:])
    assert json.loads(header["__metadata__"][PLACES]) == {"a": {"of": "a", "shape": [8, 3], "offset": [4, 0]}}


def test_blocks_of_one_tensor_have_names_of_their_own_and_are_found_by_that_of_the_tensor():
    memory = torch.arange(60.0)
    tensors = {"a": FlatPart(memory[:20], 3, (4, 3, 2)), "a#2": memory[40:43], "b": FlatPart(memory[20:30], 2, (12,))}
    parts, stage = pieces_to_write(tensors, frozenset(), 0, 1), Stage(CPU)
    staged = stage.take(parts)
    entries = load(as_file(staged))
    places = json.loads(json.loads(staged.header[8:])["__metadata__"][PLACES])
    assert len([name for name, place in places.items() if place["of"] == "a"]) == len(staged.tensors["a"]) > 2
    assert places["b"] == {"of": "b", "shape": [12], "offset": [2]}
    assert "a#2" not in places and torch.equal(entries["a#2"], memory[40:43]), "a tensor may be called so itself"
    for value in (0.0, 100.0):  # the second time into the same places
        memory.copy_(torch.arange(60.0) + value)
        again = stage.take(parts)
        assert torch.equal(torch.cat([block.flatten() for block in again.tensors["a"]]), memory[:20])
        found = load(as_file(again))
        for name, place in places.items():
            whole = torch.full(place["shape"], -1.0)
            whole.view(-1)[tensors[place["of"]].start :][: tensors[place["of"]].flat.numel()] = tensors[
                place["of"]
            ].flat
            where = tuple(slice(o, o + n) for o, n in zip(place["offset"], found[name].shape, strict=True))
            assert torch.equal(found[name], whole[where])


def test_a_type_that_no_file_holds_is_refused_by_name():
    with pytest.raises(UserError, match=r"^model: odd is torch.complex128, which a checkpoint cannot hold"):
        Stage(CPU).take([Piece("odd", torch.ones(2, dtype=torch.complex128), (2,), (0,))])
