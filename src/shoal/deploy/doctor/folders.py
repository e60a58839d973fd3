"""Folders that a run writes to: room, inodes, whether they can be written; and shared memory."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shoal.core.storage import expand_home
from shoal.deploy.doctor.finding import Finding, in_bytes, passed

LOW_BYTES = 10 << 30
"""Less than this is soon full: a checkpoint of a middling model."""
TOO_LOW_BYTES = 1 << 30
FULL_FOR_RAY = 0.95
"""Ray spills no objects to a disk that is fuller than this."""
LOW_INODES_SHARE = 0.02
SHM_LOW_BYTES = 2 << 30
"""Loader workers and Ray's objects share it."""
SHM_TOO_LOW_BYTES = 128 << 20
"""Containers are given 64 MiB unless somebody asks for more."""


@dataclass(frozen=True)
class Folder:
    """What there is to know of a place for files."""

    path: Path
    total_bytes: int = 0
    free_bytes: int = 0
    inodes: int = 0
    """0: a file system that does not count them."""
    free_inodes: int = 0
    problem: str = ""
    """Why nothing can be written there."""


def look_at_folder(path: Path, is_made: bool = True) -> Folder:
    """What there is to know of it.

    Args:
        path: The folder.
        is_made: Whoever uses it makes it, so that what is above it counts where it is not there yet.
    """
    there = path.absolute()
    if not is_made and not there.is_dir():
        return Folder(path, problem=f"{there}: {'not a folder' if there.exists() else 'not there'}")
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        facts = os.statvfs(there)
        with tempfile.NamedTemporaryFile(dir=there, prefix=".shoal-doctor-") as file:
            file.write(b"x")
            file.flush()
        problem = ""
    except OSError as error:
        problem = f"{there}: {error.strerror or error}"
        try:
            facts = os.statvfs(there)
        except OSError:
            return Folder(path, problem=problem)
    return Folder(
        path, facts.f_frsize * facts.f_blocks, facts.f_frsize * facts.f_bavail, facts.f_files, facts.f_favail, problem
    )


def cache_folder() -> Path:
    """Where downloads go."""
    return Path(os.environ.get("XDG_CACHE_HOME") or expand_home("~/.cache"))


def ray_folder() -> Path:
    """Where a Ray that is started here writes logs and objects that do not fit into memory, unless it is told."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("RAY_TEMP_DIR") or "/tmp")  # noqa: S108 - it is Ray's


def judge_run_folder(folder: Folder) -> Finding:
    """Where runs and their checkpoints go unless another place is said, so that it cannot be written is a warning."""
    if folder.problem:
        return Finding("run folder", "warn", f"not writable: {folder.problem}", "say another place: --run-dir DIR")
    return _judge_room("run folder", folder, "make room, or say another place: --run-dir DIR")


def judge_ray_folder(folder: Folder) -> Finding:
    """Where Ray's own files go."""
    if folder.problem:
        return Finding(
            "ray folder", "fail", f"not writable: {folder.problem}", "set RAY_TMPDIR, or ray start --temp-dir"
        )
    used = 1 - folder.free_bytes / folder.total_bytes if folder.total_bytes else 0.0
    finding = _judge_room("ray folder", folder, "make room, or give ray start another --temp-dir; old sessions may go")
    if finding.level == "pass" and used > FULL_FOR_RAY:
        return Finding(
            "ray folder", "warn", f"{finding.found}; Ray spills nothing above {FULL_FOR_RAY:.0%}", "make room"
        )
    return finding


def judge_cache_folder(folder: Folder) -> Finding:
    """Where downloads go. Not everybody downloads, so the worst is a warning."""
    advice = "set XDG_CACHE_HOME, or data.dir in the recipe, to a folder with room that you may write to"
    if folder.problem:
        return Finding("cache folder", "warn", f"not writable: {folder.problem}", advice)
    finding = _judge_room("cache folder", folder, advice)
    return finding if finding.level == "pass" else Finding("cache folder", "warn", finding.found, advice)


def judge_storage_folder(folder: Folder) -> Finding:
    """The storage that `--storage` names, from one machine."""
    if folder.problem:
        advice = f"mount it, and let this user write there: {folder.path}"
        return Finding("storage", "fail", f"not writable: {folder.problem}", advice)
    return _judge_room("storage", folder, "make room: shoal checkpoints list says what runs keep")


def _judge_room(check: str, folder: Folder, advice: str) -> Finding:
    used = 1 - folder.free_bytes / folder.total_bytes if folder.total_bytes else 0.0
    found = f"{folder.path}: {in_bytes(folder.free_bytes)} free ({used:.0%} used)"
    if folder.free_bytes < TOO_LOW_BYTES:
        return Finding(check, "fail", found, advice)
    if folder.inodes and folder.free_inodes < LOW_INODES_SHARE * folder.inodes:
        left = f"{found}, {folder.free_inodes:,} of {folder.inodes:,} inodes"
        return Finding(check, "warn" if folder.free_inodes else "fail", left, "delete small files; df -i shows inodes")
    if folder.free_bytes < LOW_BYTES:
        return Finding(check, "warn", found, advice)
    return passed(check, found)


def judge_shm(folder: Folder, least: int = SHM_TOO_LOW_BYTES) -> Finding:
    """`/dev/shm`, by which loader workers and Ray hand over data."""
    advice = "give the container more: docker run --shm-size 8g; on Kubernetes an emptyDir with medium: Memory"
    if folder.problem:
        return Finding("shm", "fail", f"not writable: {folder.problem}", advice)
    found = f"{in_bytes(folder.free_bytes)} of {in_bytes(folder.total_bytes)} free"
    if folder.total_bytes < least:
        return Finding("shm", "fail", found, advice)
    if folder.free_bytes < least:
        return Finding("shm", "fail", found, "it is full: see ls -l /dev/shm for what programs that ended have left")
    if folder.free_bytes < SHM_LOW_BYTES:
        return Finding("shm", "warn", found, advice)
    return passed("shm", found)
