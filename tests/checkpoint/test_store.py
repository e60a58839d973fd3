"""A checkpoint is whole or not there; damage is found; crashes leave nothing behind that grows."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.store import (
    CorruptCheckpointError,
    Snapshot,
    clear_leftovers,
    delete_checkpoint,
    list_checkpoints,
    newest_readable,
    read_checkpoint,
    save_checkpoint,
    set_aside,
)
from shoal.core.errors import RunError, UserError


def snapshot(value: float = 1.0) -> Snapshot:
    tensors = {
        "model.a": torch.full((3, 4), value),
        "model.t": torch.arange(6.0).reshape(2, 3).t(),  # not contiguous
        "optim.a.step": torch.tensor(value),
        "model.n": torch.tensor([1, 2], dtype=torch.int64),
        "model.h": torch.ones(2, dtype=torch.bfloat16),
    }
    return Snapshot(tensors, {"train": {"step": int(value)}, "floats": [0.1, 1e-300, 3.0000000000000004]})


def save(folder: Path, step: int, value: float = 1.0):
    return save_checkpoint(folder, snapshot(value), step=step, epoch=step // 10, metrics={"val_loss": value})


def test_what_was_saved_is_read_back_exactly(tmp_path):
    info = save(tmp_path / "c", 7)
    read = read_checkpoint(info)
    expected = snapshot()
    assert read.values == expected.values
    assert read.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(read.tensors[name], tensor) and read.tensors[name].dtype == tensor.dtype
    assert (info.step, info.epoch, dict(info.metrics)) == (7, 0, {"val_loss": 1.0})
    assert info.path.name == "step-00000007"


def test_checkpoints_are_listed_by_step(tmp_path):
    for step in (30, 4, 100_000_000):
        save(tmp_path, step)
    assert [info.step for info in list_checkpoints(tmp_path)] == [4, 30, 100_000_000]
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_saving_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, 1.0)
    info = save(tmp_path, 5, 2.0)
    assert read_checkpoint(info).values["train"]["step"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "empty", "append"])
def test_every_damage_is_found(tmp_path, name, damage):
    info = save(tmp_path, 5)
    path = info.path / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        position = len(content) // 3 if name != "manifest.json" else content.index(b"sha256") + 12
        content[position] ^= 4
    path.write_bytes({"truncate": content[:-7], "empty": b"", "append": content + b"x"}.get(damage, content))
    if damage == "delete":
        path.unlink()
    with pytest.raises(CorruptCheckpointError):
        read_checkpoint(info)


def test_files_of_another_checkpoint_do_not_pass(tmp_path):
    one, other = save(tmp_path, 5, 1.0), save(tmp_path, 6, 2.0)
    (one.path / "tensors.safetensors").write_bytes((other.path / "tensors.safetensors").read_bytes())
    with pytest.raises(CorruptCheckpointError, match=r"tensors\.safetensors has changed"):
        read_checkpoint(one)


def test_a_newer_format_is_refused_in_words(tmp_path):
    info = save(tmp_path, 5)
    manifest = json.loads((info.path / "manifest.json").read_text()) | {"format": 99}
    (info.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"--resume: .* in format 99, .* use the newer one"):
        read_checkpoint(info)
    assert info.path.is_dir()


def test_the_newest_that_can_be_read_comes_last_of_a_walk_down(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, float(step))
    for step in (2, 3):
        (tmp_path / f"step-{step:08d}" / "state.json").write_text("{}")
    walk = list(newest_readable(tmp_path))
    assert [info.step for info, _ in walk] == [3, 2, 1]
    assert isinstance(walk[0][1], CorruptCheckpointError) and isinstance(walk[2][1], Snapshot)
    aside = set_aside(walk[0][0])
    assert aside.is_dir() and [info.step for info in list_checkpoints(tmp_path)] == [1, 2]


@pytest.mark.parametrize("manifest", [None, "", "{", "[]", '{"step": 5}'])
def test_without_its_manifest_a_checkpoint_is_not_listed_and_is_told_of_on_the_way_down(tmp_path, manifest):
    save(tmp_path, 4)
    info = save(tmp_path, 5)
    (info.path / "manifest.json").unlink()
    if manifest is not None:
        (info.path / "manifest.json").write_text(manifest)
    assert [found.step for found in list_checkpoints(tmp_path)] == [4]
    walk = list(newest_readable(tmp_path))
    assert [found.step for found, _ in walk] == [5, 4]
    assert isinstance(walk[0][1], CorruptCheckpointError) and "manifest.json" in str(walk[0][1])


def test_deleting_and_clearing_leave_nothing(tmp_path):
    delete_checkpoint(save(tmp_path, 5))
    (tmp_path / ".writing-step-00000006-1").mkdir()
    (tmp_path / ".deleting-step-00000004").mkdir()
    kept = save(tmp_path, 8)
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [kept.path]


def test_a_disk_that_takes_no_more_is_told_and_earlier_checkpoints_stay(tmp_path, without_coverage):
    script = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from shoal.checkpoint.store import *; from shoal.core.errors import RunError\n"
        "folder = Path(sys.argv[1]); small = Snapshot({'a': torch.ones(4)}, {})\n"
        "save_checkpoint(folder, small, step=1, epoch=0, metrics={})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try: save_checkpoint(folder, Snapshot({'a': torch.ones(10**6)}, {}), step=2, epoch=0, metrics={})\n"
        "except RunError as error: print(error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, env=without_coverage, capture_output=True, text=True, check=True)
    assert "checkpoint of step 2 could not be written" in result.stdout
    assert "earlier checkpoints are untouched" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_an_unwritable_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="could not be written"):
        save(tmp_path / "file" / "c", 1)


def test_killed_while_saving_the_newest_that_is_listed_is_whole(tmp_path):
    """Kills a process that saves without pause, again and again, at points that chance decides."""
    script = (
        "import sys, torch; from pathlib import Path\n"
        "from shoal.checkpoint.store import *\n"
        "folder = Path(sys.argv[1]); step = int(sys.argv[2])\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    step += 1\n"
        "    tensors = {'a': torch.full((200_000,), float(step))}\n"
        "    save_checkpoint(folder, Snapshot(tensors, {'step': step}), step=step, epoch=0, metrics={})\n"
        "    for old in list_checkpoints(folder)[:-2]: delete_checkpoint(old)\n"
    )
    newest = 0
    for round_ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(newest)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.15 + 0.037 * round_)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        clear_leftovers(tmp_path)
        found = list_checkpoints(tmp_path)
        assert found, "at least one save must have ended"
        for info in found:
            read = read_checkpoint(info)
            assert read.values["step"] == info.step and bool((read.tensors["a"] == info.step).all())
        assert found[-1].step >= newest
        newest = found[-1].step
        assert len(list(tmp_path.iterdir())) == len(found) <= 3, "nothing is left that grows"
