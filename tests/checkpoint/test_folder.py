"""What a folder of checkpoints holds, who may delete what, and what a crash leaves."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.checkpoint.folder import (
    being_read,
    clear_leftovers,
    delete_checkpoint,
    is_being_read,
    list_checkpoints,
    read_info,
    set_aside,
    step_folders,
)
from shoal.checkpoint.manifest import CorruptCheckpointError
from shoal.core.errors import UserError
from tests.checkpoint.states import check, read, save


def test_checkpoints_are_listed_by_step(tmp_path):
    save(tmp_path, 30, 4, 100_000_000)
    assert [info.step for info in list_checkpoints(tmp_path)] == [4, 30, 100_000_000]
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_saving_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 5)
    before = read_info(tmp_path / "step-00000005").manifest.time
    info = save(tmp_path, 5)
    assert info.manifest.time > before
    check(read(info), 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("manifest", [None, "", "{", "[]", '{"step": 5}'])
def test_without_its_manifest_a_checkpoint_is_not_listed(tmp_path, manifest):
    save(tmp_path, 4, 5)
    path = tmp_path / "step-00000005" / "manifest.json"
    path.unlink()
    if manifest is not None:
        path.write_text(manifest)
    assert [found.step for found in list_checkpoints(tmp_path)] == [4]
    assert [found.name for found in step_folders(tmp_path)] == ["step-00000004", "step-00000005"]
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is"):
        read_info(path.parent)


def test_the_manifest_of_another_step_is_no_manifest(tmp_path):
    save(tmp_path, 4, 5)
    delete_checkpoint(tmp_path / "step-00000005")
    (tmp_path / "step-00000004").rename(tmp_path / "step-00000005")
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is that of step 4"):
        read_info(tmp_path / "step-00000005")


def test_a_manifest_that_cannot_be_read_now_says_nothing_about_the_checkpoint(tmp_path, monkeypatch):
    info = save(tmp_path, 4)

    def fails(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pathlib.Path.read_bytes", fails)
    with pytest.raises(UserError, match=r"cannot be read: .*Input/output error; mend that first"):
        read_info(info.path)


def test_deleting_and_clearing_leave_nothing(tmp_path):
    delete_checkpoint(save(tmp_path, 5).path)
    (tmp_path / ".writing-step-00000006-1").mkdir()
    (tmp_path / ".deleting-step-00000004").mkdir()
    kept = save(tmp_path, 8)
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [kept.path]


def test_what_replaces_another_is_there_after_a_crash_that_left_both(tmp_path):
    info = save(tmp_path, 5)
    old = tmp_path / ".replaced-step-00000005"
    old.mkdir()
    clear_leftovers(tmp_path)
    check(read(info), 5)
    assert not old.exists()


def test_what_was_being_replaced_when_it_crashed_comes_back(tmp_path):
    info = save(tmp_path, 5)
    info.path.rename(tmp_path / ".replaced-step-00000005")
    clear_leftovers(tmp_path)
    check(read(info), 5)


def test_only_a_few_corrupt_ones_are_kept_to_be_looked_at(tmp_path):
    for step in range(1, 6):
        set_aside(save(tmp_path, step).path)
    names = sorted(path.name[:21] for path in tmp_path.iterdir())
    assert names == ["corrupt-step-00000004", "corrupt-step-00000005"]


def test_one_that_is_being_read_is_not_deleted_in_whatever_process(tmp_path):
    info = save(tmp_path, 1)
    script = (
        "import sys; from pathlib import Path; from shoal.checkpoint.folder import *\n"
        "with being_read(read_info(Path(sys.argv[1]))): print('reading', flush=True); sys.stdin.read()\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", script, str(info.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
        assert is_being_read(info.path)
        save(tmp_path, 2, 3, 4, keep_last=1)
        assert [found.step for found in list_checkpoints(tmp_path)] == [1, 4]
    finally:
        reader.communicate("")
    assert not is_being_read(info.path)
    save(tmp_path, 5, keep_last=1)
    assert [found.step for found in list_checkpoints(tmp_path)] == [5]


def test_one_that_is_deleted_while_a_reader_comes_is_gone_for_the_reader(tmp_path, monkeypatch):
    info = save(tmp_path, 1)
    flock = fcntl.flock

    def delete_first(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        assert delete_checkpoint(info.path)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with pytest.raises(CorruptCheckpointError, match="it is gone"), being_read(info):
        pass


def test_only_the_names_of_checkpoints_are_taken_for_checkpoints(tmp_path):
    info = save(tmp_path, 4)
    for name in ("step-99", "step-000000099", "step-x", "step-"):
        (tmp_path / name).mkdir()
    assert step_folders(tmp_path) == [info.path]


def test_a_manifest_that_cannot_be_read_keeps_no_other_from_being_deleted(tmp_path):
    save(tmp_path, 1, 2)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    manifest.unlink()
    manifest.symlink_to(manifest)  # too many levels of symbolic links
    save(tmp_path, 3, 4, 5, keep_last=1)
    assert [found.step for found in list_checkpoints(tmp_path)] == [5]
    assert (tmp_path / "step-00000001").is_dir()


def test_everything_is_on_the_disk_before_it_is_renamed_and_the_rename_after_it(tmp_path, monkeypatch):
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor):
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def note_rename(self, target):
        done.append("renamed")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    save(tmp_path, 7)
    before, after = done[: done.index("renamed")], done[done.index("renamed") + 1 :]
    files = ["shard-00000.safetensors", "worker-00000.json", "state.json", "recipe.yaml", "manifest.json"]
    assert before[:5] == files and before[5].startswith(".writing-step-00000007") and after == [tmp_path.name]


def test_one_that_is_gone_is_told_and_file_systems_without_locks_are_borne(tmp_path, monkeypatch):
    info = save(tmp_path, 1)

    def no_locks(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with being_read(info):
        assert not is_being_read(info.path)
    monkeypatch.undo()
    delete_checkpoint(info.path)
    assert not is_being_read(info.path)
    with pytest.raises(CorruptCheckpointError, match="it is gone"), being_read(info):
        pass
