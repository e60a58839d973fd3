"""Looking at checkpoints, every byte of them, without changing a thing: which are whole, and why others are not."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.folder import being_read, read_info, step_folders, step_of
from shoal.checkpoint.manifest import CheckpointInfo, CorruptCheckpointError
from shoal.checkpoint.read import read_content, verify
from shoal.core.errors import UserError

WHOLE, CORRUPT, GONE, UNREADABLE = "whole", "corrupt", "gone", "unreadable"


@dataclass(frozen=True)
class Looked:
    """What there is to say of one checkpoint."""

    path: Path
    state: str
    """whole; corrupt; gone: the run has deleted it meanwhile; unreadable: the disk or the version of Shoal is wrong."""
    words: str = ""
    """Why it is not whole."""
    info: CheckpointInfo | None = None
    """What its manifest says, where that can be trusted."""
    seconds: float = 0.0
    """How long it took to read."""

    @property
    def step(self) -> int:
        """The step in its name."""
        return step_of(self.path)

    @property
    def is_whole(self) -> bool:
        """Whether a run can go on from it."""
        return self.state == WHOLE

    @property
    def num_bytes(self) -> int:
        """What the manifest vouches for."""
        return self.info.num_bytes if self.info else 0

    def to_record(self) -> dict[str, Any]:
        """For programs that ask."""
        speed = self.num_bytes / self.seconds / 1e9 if self.is_whole else None
        return {
            "step": self.step,
            "path": str(self.path),
            "state": self.state,
            "reason": self.words or None,
            "bytes": self.num_bytes,
            "seconds": round(self.seconds, 3),
            "gb_per_s": None if speed is None else round(speed, 3),
        }


def look(path: Path) -> Looked:
    """Read every byte of the checkpoint in this folder. A run that trains meanwhile leaves it there until then."""
    while True:
        before = _identity(path)
        if before is None:
            return Looked(path, GONE, "the run has deleted it meanwhile")
        found = _look_once(path)
        # What a run has deleted, or saved once more with its evaluation, under our eyes, is no damage: look again.
        if found.state != CORRUPT or _identity(path) == before:
            return found


def _look_once(path: Path) -> Looked:
    info, began = None, time.perf_counter()
    try:
        info = read_info(path)
        with being_read(info):
            verify(info)
            read_content(info)
    except CorruptCheckpointError as error:
        return Looked(path, CORRUPT, str(error), info, time.perf_counter() - began)
    except UserError as error:
        return Looked(path, UNREADABLE, str(error), info, time.perf_counter() - began)
    return Looked(path, WHOLE, "", info, time.perf_counter() - began)


def _identity(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def newest_whole(folder: Path, below: int | None = None) -> tuple[Looked | None, list[Looked]]:
    """The newest checkpoint that is whole, of those before step `below`, and the newer ones that are not."""
    rejected: list[Looked] = []
    for path in reversed(step_folders(folder)):
        if below is None or step_of(path) < below:
            found = look(path)
            if found.is_whole:
                return found, rejected
            rejected.append(found)
    return None, rejected


def look_at_whole(path: Path, what: str) -> CheckpointInfo:
    """The checkpoint in this folder, every byte of it read; `UserError` that names an older one if it is not whole.

    Args:
        path: Of the checkpoint.
        what: The option or field that asked for it.
    """
    found = look(path)
    if found.is_whole:
        assert found.info is not None
        return found.info
    older, _ = newest_whole(path.parent, below=found.step)
    remedy = f"the nearest older one that is whole is step {older.step}" if older else "there is no older one instead"
    raise UserError(f"{what}: {path} is {found.state}: {found.words}; {remedy}")
