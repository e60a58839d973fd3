"""Whole tensors, and any block of them, from files that any number of workers wrote."""

import itertools
import math
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, zeros

from shoal.checkpoint.dcp import DcpReader, load_into
from shoal.checkpoint.folder import read_info, shard_name
from shoal.checkpoint.manifest import CheckpointInfo, CorruptCheckpointError, Manifest
from shoal.checkpoint.pieces import pieces_to_write
from shoal.checkpoint.read import Tensors, read_content, verify
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.section import CheckpointSection
from shoal.checkpoint.stage import Stage
from shoal.core.errors import UserError
from shoal.core.parts import FlatPart, read_flat
from shoal.core.process import Process
from tests.checkpoint.states import CPU, check, cut_flat, read, save, save_tensors, snapshot, tensors_of


def save_on(process: Process, folder: Path, step: int) -> None:
    save(folder, step, process=process)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_any_number_of_workers_saved_is_read_back_exactly(ranks, tmp_path, world_size):
    ranks(world_size)(save_on, tmp_path, 7)
    info = read_info(tmp_path / "step-00000007")
    assert info.manifest.world_size == world_size and (info.path / "recipe.yaml").read_text() == "name: x\n"
    check(read(info), 7, world_size)
    assert {path.name for path in info.path.iterdir()} == {*info.manifest.files, "manifest.json"}


def test_any_block_can_be_read(ranks, tmp_path):
    ranks(3)(save_on, tmp_path, 7)
    found = Tensors(read_info(tmp_path / "step-00000007"))
    whole = tensors_of(7.0)["model.weight"]
    assert len(found.places["model.weight"]) > 1
    for first, last in itertools.combinations((0, 1, 99, 100, 101, 200, 299, 300), 2):
        assert torch.equal(found.block("model.weight", (first, 3), (last - first, 90)), whole[first:last, 3:93])


def save_sharded(process: Process, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (process.world_size,))
    tensors = {"model.w": distribute_tensor(torch.arange(7001.0 * 5).reshape(7001, 5), mesh, [Shard(0)])}
    saver = Saver(folder, CheckpointSection(), process)
    saver.save(snapshot(1, rank=process.rank, tensors=tensors))
    saver.finish()


def load_sharded(process: Process, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (process.world_size,))
    target = {"model.w": zeros(7001, 5, device_mesh=mesh, placements=[Shard(1)]), "plain": torch.zeros(7001, 5)}
    load_into(folder / "step-00000001", {"model.w": target["model.w"]})
    load_into(folder / "step-00000001", {"model.w": target["plain"]})
    assert isinstance(target["model.w"], DTensor)
    return target["model.w"].full_tensor(), target["plain"]


@pytest.mark.parametrize(("writers", "readers"), [(4, 2), (2, 3), (1, 4)])
def test_distributed_tensors_are_read_into_any_other_division(ranks, tmp_path, writers, readers):
    ranks(writers)(save_sharded, tmp_path)
    expected = torch.arange(7001.0 * 5).reshape(7001, 5)
    assert torch.equal(read(read_info(tmp_path / "step-00000001")).tensors["model.w"], expected)
    for sharded, plain in ranks(readers)(load_sharded, tmp_path):
        assert torch.equal(sharded, expected) and torch.equal(plain, expected)


def write_shards(folder: Path, held: list[dict[str, torch.Tensor | FlatPart]]) -> Tensors:
    """What each of some workers holds, as their shards."""
    for rank, tensors in enumerate(held):
        staged = Stage(CPU).take(pieces_to_write(tensors, frozenset(), rank, len(held)))
        (folder / shard_name(rank)).write_bytes(staged.header + bytes(staged.data.numpy()))
    manifest = Manifest(1, 0, {}, 0.0, len(held), "deepspeed", {})
    return Tensors(CheckpointInfo(folder, manifest))


@given(shape=st.lists(st.integers(0, 6), max_size=4).map(tuple), world_size=st.integers(1, 5), data=st.data())
def test_stretches_of_any_tensor_cut_anywhere_are_read_back_whole_by_block_and_by_stretch(shape, world_size, data):
    whole = torch.arange(float(math.prod(shape))).reshape(shape)
    cuts = data.draw(st.lists(st.integers(0, whole.numel()), min_size=world_size - 1, max_size=world_size - 1))
    held = [{"w": part, "plain": torch.ones(2)} for part in cut_flat(whole, cuts)]
    with tempfile.TemporaryDirectory() as folder:
        found = write_shards(Path(folder), held)
        assert found.keys() == {"w", "plain"} and found.shapes["w"] == shape
        assert torch.equal(found["w"], whole) and found["w"].dtype == whole.dtype
        offset = [data.draw(st.integers(0, size)) for size in shape]
        length = [data.draw(st.integers(0, size - begin)) for size, begin in zip(shape, offset, strict=True)]
        where = tuple(slice(begin, begin + count) for begin, count in zip(offset, length, strict=True))
        assert torch.equal(found.block("w", offset, length), whole[where])
        start = data.draw(st.integers(0, whole.numel()))
        count = data.draw(st.integers(0, whole.numel() - start))
        assert torch.equal(read_flat(found, "w", start, count), whole.reshape(-1)[start : start + count])


def save_stretches(process: Process, folder: Path) -> None:
    whole = torch.arange(7001.0 * 5).reshape(7001, 5)
    cuts = [number * 9999 + 1 for number in range(1, process.world_size)]
    mesh = init_device_mesh("cpu", (process.world_size,))
    tensors = {
        "model.w": cut_flat(whole, cuts)[process.rank],
        "model.d": distribute_tensor(whole, mesh, [Shard(0)]),
        "model.p": torch.ones(40_000),
    }
    save_tensors(folder, tensors, process=process)


@pytest.mark.parametrize(("writers", "readers"), [(3, 2), (2, 4)])
def test_stretches_are_read_into_any_other_division(ranks, tmp_path, writers, readers):
    ranks(writers)(save_stretches, tmp_path)
    expected = torch.arange(7001.0 * 5).reshape(7001, 5)
    content = read(read_info(tmp_path / "step-00000001"))
    for name in ("model.w", "model.d"):
        assert torch.equal(content.tensors[name], expected)
    for sharded, plain in ranks(readers)(load_sharded, tmp_path):
        assert torch.equal(sharded, expected) and torch.equal(plain, expected)


def test_a_stretch_that_nobody_wrote_is_missed(tmp_path):
    parts = cut_flat(torch.rand(5, 4), [7, 13])
    write_shards(tmp_path, [{"w": part} for part in parts])
    with pytest.raises(CorruptCheckpointError, match=r"^w is not whole"):
        write_shards(tmp_path, [{"w": part} for part in parts[:2]])
    with pytest.raises(CorruptCheckpointError, match=r"^w is not whole"):
        write_shards(tmp_path, [{"w": part} for part in [*parts, parts[0]]])


def test_dcp_reads_a_checkpoint_by_its_path(tmp_path):
    info = save(tmp_path, 3)
    reader = DcpReader(str(info.path))
    metadata = reader.read_metadata()
    assert metadata.state_dict_metadata.keys() == tensors_of(3.0).keys()
    assert DcpReader.validate_checkpoint_id(info.path) and not DcpReader.validate_checkpoint_id(3)


def test_each_reader_verifies_its_share_and_together_all_of_it(tmp_path):
    info = save(tmp_path, 3)
    (info.path / "state.json").write_text("{}")
    found = []
    for rank in range(2):
        try:
            verify(info, rank, 2)
        except CorruptCheckpointError as error:
            found.append(str(error))
    assert len(found) == 1 and found[0].startswith("state.json has 2 bytes instead of")


def test_a_disk_that_fails_is_not_taken_for_damage(tmp_path, monkeypatch):
    info = save(tmp_path, 3)

    def fails(path, facts):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("shoal.checkpoint.read.verify_file", fails)
    with pytest.raises(UserError, match="Input/output error; mend that first"):
        verify(info)


def test_a_tensor_of_which_a_part_is_nowhere_is_found(ranks, tmp_path):
    ranks(2)(save_on, tmp_path, 7)
    info = read_info(tmp_path / "step-00000007")
    shutil.copy(info.path / "shard-00000.safetensors", info.path / "shard-00001.safetensors")
    with pytest.raises(CorruptCheckpointError, match="is not whole"):
        read_content(info)
    (info.path / "shard-00001.safetensors").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match="a shard cannot be read"):
        read_content(info)
