"""Deleting checkpoints that need not be kept, of a run that nobody trains."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.checkpoint.check import CORRUPT, look
from shoal.checkpoint.folder import clear_leftovers, delete_checkpoint, is_being_read, list_checkpoints, step_folders
from shoal.checkpoint.retention import to_delete
from shoal.checkpoint.section import CheckpointSection


@dataclass(frozen=True)
class Removed:
    """What was deleted, or would be."""

    path: Path
    num_bytes: int
    """On the disk, manifest and all."""


@dataclass
class Pruned:
    """What became of a run's checkpoints."""

    removed: list[Removed] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    """Steps."""
    being_read: list[int] = field(default_factory=list)
    """Steps that would have gone, had nobody read them just now."""
    problem: str | None = None
    """Why no checkpoint was deleted although some might have been."""

    @property
    def num_bytes(self) -> int:
        """What was freed, or would be."""
        return sum(removed.num_bytes for removed in self.removed)

    def to_record(self) -> dict[str, Any]:
        """For programs that ask."""
        return {
            "deleted": [{"path": str(removed.path), "bytes": removed.num_bytes} for removed in self.removed],
            "bytes": self.num_bytes,
            "kept": self.kept,
            "being_read": self.being_read,
            "problem": self.problem,
        }


def prune(folder: Path, policy: CheckpointSection, *, dry_run: bool = False, with_corrupt: bool = False) -> Pruned:
    """Delete what `policy` does not keep, and what a crash left behind. Call only while holding the run's lock.

    As long as the newest checkpoint is not whole, no other is deleted: an older one is what the run can go on from.

    Args:
        folder: Of the run's checkpoints.
        policy: What to keep.
        dry_run: Delete nothing, and say what would be.
        with_corrupt: Also what is corrupt: set aside when the run was resumed, or newer than one that is whole.
    """
    pruned = Pruned()
    rubbish = _leftovers(folder)
    if with_corrupt:
        rubbish += [*sorted(folder.glob("corrupt-step-*")), *_corrupt_ones(folder)]
    pruned.removed += [Removed(path, _size(path)) for path in rubbish]
    if not dry_run:
        clear_leftovers(folder)
        for path in rubbish:
            shutil.rmtree(path, ignore_errors=True)
    found = list_checkpoints(folder)
    doomed = to_delete(found, policy)
    pruned.being_read = [info.step for info in doomed if is_being_read(info.path)]
    doomed = [info for info in doomed if info.step not in pruned.being_read]
    if (doomed or not found) and (there := step_folders(folder)) and not (newest := look(there[-1])).is_whole:
        pruned.problem = f"step {newest.step}, the newest, is {newest.state}: {newest.words}"
        doomed = []
    for info in doomed:
        pruned.removed.append(Removed(info.path, _size(info.path)))
        if not dry_run:
            delete_checkpoint(info.path)
    gone = {info.step for info in doomed}
    pruned.kept = [info.step for info in found if info.step not in gone]
    return pruned


def _corrupt_ones(folder: Path) -> list[Path]:
    """Checkpoints that are corrupt and newer than one that is whole: none, where there is none."""
    found: list[Path] = []
    for path in reversed(step_folders(folder)):
        if (looked := look(path)).is_whole:
            return found
        if looked.state == CORRUPT:
            found.append(path)
    return []


def _leftovers(folder: Path) -> list[Path]:
    """What `clear_leftovers` deletes; not what it puts back."""
    found = [path for pattern in (".writing-*", ".deleting-*") for path in sorted(folder.glob(pattern))]
    replaced = sorted(folder.glob(".replaced-*"))
    return found + [path for path in replaced if path.with_name(path.name.removeprefix(".replaced-")).exists()]


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
