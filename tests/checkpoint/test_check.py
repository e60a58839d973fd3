"""Looking at a checkpoint: damage is found, and what a running run deletes or saves again is not taken for damage."""

import threading
import time
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.check import look, look_at_whole, newest_whole
from shoal.checkpoint.folder import delete_checkpoint, is_being_read, step_name
from shoal.core.errors import UserError
from tests.checkpoint.states import save_tensors


def flip_a_bit(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save_tensors(tmp_path / "c", {"model.a": torch.full((100,), float(step))}, step)
    return tmp_path / "c"


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.safetensors", "state.json", "worker-00000.json"])
@pytest.mark.parametrize("position", [0, -1])
def test_a_single_bit_is_found(folder: Path, name: str, position: int) -> None:
    flip_a_bit(folder / step_name(2) / name, position)
    found = look(folder / step_name(2))
    assert found.state == "corrupt" and name in found.words
    assert [look(folder / step_name(step)).state for step in (1, 3)] == ["whole", "whole"]


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.safetensors", "state.json", "worker-00000.json"])
def test_a_file_that_is_not_there_is_found(folder: Path, name: str) -> None:
    (folder / step_name(2) / name).unlink()
    found = look(folder / step_name(2))
    assert (found.state, found.words) == ("corrupt", f"{name} is missing")


def test_a_checkpoint_is_held_while_it_is_looked_at(tmp_path: Path) -> None:
    info = save_tensors(tmp_path / "c", {"model.a": torch.zeros(32 << 20)})
    thread = threading.Thread(target=look, args=(info.path,))
    thread.start()
    seen = False
    while thread.is_alive() and not seen:
        seen = is_being_read(info.path)
        time.sleep(0.001)
    thread.join()
    assert seen and not is_being_read(info.path)


def test_what_is_deleted_meanwhile_is_gone_and_not_corrupt(folder: Path) -> None:
    path = folder / step_name(2)
    delete_checkpoint(path)
    assert look(path).state == "gone"


def test_no_look_at_a_live_run_finds_damage(tmp_path: Path) -> None:
    """A run that saves the same step again and again, and deletes it, as fast as it can."""
    folder, tensors = tmp_path / "c", {"model.a": torch.zeros(1 << 18)}
    path = save_tensors(folder, tensors).path
    over = threading.Event()

    def train() -> None:
        for number in range(60):
            save_tensors(folder, tensors)
            if number % 5 == 4:
                delete_checkpoint(path)
        over.set()

    thread = threading.Thread(target=train)
    thread.start()
    states = []
    while not over.is_set():
        states.append(look(path))
    thread.join()
    assert {found.state for found in states} <= {"whole", "gone"}, [found.words for found in states]
    assert any(found.is_whole for found in states)


def test_a_newer_format_is_no_damage(folder: Path) -> None:
    (folder / step_name(2) / "manifest.json").write_text('{"format": 1, "files": {"a": {"sha256": ""}}}')
    found = look(folder / step_name(2))
    assert found.state == "unreadable" and "format 1" in found.words


def test_the_newest_whole_one_and_what_was_passed_over(folder: Path) -> None:
    flip_a_bit(folder / step_name(3) / "state.json", 0)
    found, rejected = newest_whole(folder)
    assert found is not None and found.step == 2 and [looked.step for looked in rejected] == [3]
    assert newest_whole(folder, below=1) == (None, [])
    flip_a_bit(folder / step_name(2) / "state.json", 0)
    with pytest.raises(UserError, match=r"--x: .*step-00000003 is corrupt: state.json .*nearest older .* is step 1"):
        look_at_whole(folder / step_name(3), "--x")
    flip_a_bit(folder / step_name(1) / "state.json", 0)
    with pytest.raises(UserError, match="there is no older one instead"):
        look_at_whole(folder / step_name(3), "--x")
