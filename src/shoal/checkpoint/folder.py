"""The checkpoints of a run in its folder: what is committed, being written, being read, found corrupt.

    step-00000500/
      shard-00000.safetensors   worker 0's part of the weights and of the optimizer's state; one such file a worker
      worker-00000.json         its random generators and its loss since the last report; one such file a worker
      state.json                what there is once: step, position, loss scale, best metric, what identifies the run
      recipe.yaml               the recipe, fully resolved
      manifest.json             size and hash of the others; without it there is no checkpoint

A folder of another name is not a checkpoint: it was being written or deleted, or was found corrupt.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.checkpoint.manifest import MANIFEST, CheckpointInfo, CorruptCheckpointError, Manifest, parse_manifest
from shoal.core.errors import UserError
from shoal.core.storage import fsync_directory

_CORRUPT_TO_KEEP = 2
"""What was found corrupt can be looked at, but must not fill the disk."""


def step_name(step: int) -> str:
    """`step-00000500`"""
    return f"step-{step:08d}"


def shard_name(rank: int) -> str:
    """The file of a worker's tensors."""
    return f"shard-{rank:05d}.safetensors"


def worker_name(rank: int) -> str:
    """The file of a worker's own small values."""
    return f"worker-{rank:05d}.json"


def folder_to_write(folder: Path, step: int, token: str) -> Path:
    """Where a checkpoint is put together; `token` tells one attempt from another."""
    return folder / f".writing-{step_name(step)}-{token}"


def commit(aside: Path, folder: Path, manifest: Manifest) -> CheckpointInfo:
    """Make what lies in `aside` a checkpoint, in one step. Its files are safe on the disk already."""
    target = folder / step_name(manifest.step)
    with (aside / MANIFEST).open("xb") as file:
        file.write(manifest.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(aside)
    replaced = folder / f".replaced-{target.name}"
    if target.exists():  # the same step again, with an evaluation that was still to come the first time
        target.rename(replaced)
    try:
        aside.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    fsync_directory(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return CheckpointInfo(target, manifest)


def step_folders(folder: Path) -> list[Path]:
    """Everything that has the name of a checkpoint, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted((path for path in found if path.name == step_name(step_of(path))), key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def read_info(path: Path) -> CheckpointInfo:
    """A checkpoint by its manifest; `CorruptCheckpointError` where that cannot be trusted."""
    try:
        manifest = parse_manifest((path / MANIFEST).read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CorruptCheckpointError(f"{MANIFEST} is missing") from error
    except OSError as error:  # a disk or file system that fails now says nothing about the checkpoint
        raise UserError(f"{path} cannot be read: {error}; mend that first") from error
    if manifest.step != step_of(path):
        raise CorruptCheckpointError(f"{MANIFEST} is that of step {manifest.step}")
    return CheckpointInfo(path, manifest)


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """The checkpoints of a run whose manifest can be read and is whole, oldest first. Reads nothing but manifests."""
    found = []
    for path in step_folders(folder):
        with contextlib.suppress(CorruptCheckpointError, UserError):  # told of when they are verified, or resumed from
            found.append(read_info(path))
    return found


@contextlib.contextmanager
def being_read(info: CheckpointInfo) -> Iterator[None]:
    """Keep retention, in whatever process, from deleting a checkpoint while it is read."""
    path = info.path / MANIFEST
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            with _where_there_are_locks():
                fcntl.flock(file, fcntl.LOCK_SH)
            is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except FileNotFoundError:
            is_there = False
        if not is_there:  # whoever deletes holds the lock for as long as it takes to rename
            raise CorruptCheckpointError("it is gone: the run has deleted it meanwhile")
        yield


def is_being_read(path: Path) -> bool:
    """Whether some process is in `being_read` of the checkpoint in this folder."""
    try:
        with (path / MANIFEST).open("r+b") as file, _where_there_are_locks():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nothing there to be read
        return False
    return False


@contextlib.contextmanager
def _where_there_are_locks() -> Iterator[None]:
    """Some file systems of clusters have none; a checkpoint is then read at the reader's own risk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise


def set_aside(path: Path) -> Path:
    """Rename a corrupt checkpoint so that it is no longer taken for one, but can still be looked at."""
    target = path.with_name(f"corrupt-{path.name}-{time.time_ns()}")
    path.rename(target)
    earlier = sorted(path.parent.glob("corrupt-step-*"), key=lambda found: found.name.rpartition("-")[2])
    for old in earlier[:-_CORRUPT_TO_KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def delete_checkpoint(path: Path) -> bool:
    """Remove a checkpoint, unless somebody reads it; renamed first, so that a crash leaves no half of one."""
    doomed = path.with_name(f".deleting-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context((path / MANIFEST).open("r+b"))
            with _where_there_are_locks():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            pass  # nothing that could be read
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def clear_leftovers(folder: Path) -> None:
    """Remove what a crash left half written or half deleted, and put back what was being replaced.

    Call only while holding the run's lock, and before reading a checkpoint.
    """
    for path in folder.glob(".replaced-*"):
        target = path.with_name(path.name.removeprefix(".replaced-"))
        if target.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(target)
    for pattern in (".writing-*", ".deleting-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
