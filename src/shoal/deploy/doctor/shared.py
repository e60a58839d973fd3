"""Whether a folder is the same storage on every machine: what one writes, the others read."""

import contextlib
import fcntl
import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.storage import fsync_directory
from shoal.deploy.doctor.finding import Finding, Level, in_bytes, in_list, passed
from shoal.deploy.doctor.folders import LOW_BYTES, TOO_LOW_BYTES
from shoal.observe.number_words import counted

SIZE = 1 << 20
SEEN_WITHIN_S = 5.0
"""A network file system may show new files late."""
LATE_S = 1.0
_LOCK = "lock"


def file_name(key: str, index: int | str) -> str:
    """Of what one machine writes; hidden, and told from those of another doctor by the key."""
    return f".shoal-doctor-{key}-{index}"


def write(folder: str, key: str, index: int) -> dict[str, Any]:
    """Write, fsync, rename; `sha256` and `free_bytes`, or an `error`."""
    target = Path(folder) / file_name(key, index)
    partial = target.with_name(target.name + ".tmp")
    content = os.urandom(SIZE)
    began = time.monotonic()
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
        fsync_directory(target.parent)
        facts = os.statvfs(folder)
    except OSError as error:
        with contextlib.suppress(OSError):  # what could not be written need not be there
            partial.unlink()
        return {"error": error.strerror or str(error)}
    took_s = time.monotonic() - began
    return {"sha256": hashlib.sha256(content).hexdigest(), "free_bytes": facts.f_frsize * facts.f_bavail, "s": took_s}


def read(folder: str, key: str, expected: Mapping[int, str], within_s: float = SEEN_WITHIN_S) -> dict[str, Any]:
    """What is wrong with each of the files of the others: a text, empty where all is well; and how long it took.

    Args:
        folder: The storage.
        key: Of this doctor.
        expected: The hash of each machine's file, by its number.
        within_s: How long files may take to be seen.
    """
    began = time.monotonic()
    wrong = dict.fromkeys(expected, "not seen")
    while True:
        for index in [index for index, why in wrong.items() if why]:
            wrong[index] = _compare(Path(folder) / file_name(key, index), expected[index])
        took_s = time.monotonic() - began
        if not any(wrong.values()) or took_s > within_s:
            return {"wrong": {str(index): why for index, why in wrong.items() if why}, "s": took_s}
        time.sleep(0.1)


def _compare(file: Path, sha256: str) -> str:
    try:
        return "" if hashlib.sha256(file.read_bytes()).hexdigest() == sha256 else "other content"
    except FileNotFoundError:
        return "not seen"
    except OSError as error:
        return error.strerror or str(error)


class Lock:
    """A lock in the folder, as the one of a run's folder."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, folder: str, key: str) -> str:
        """`taken`, `held` by somebody else, or why neither."""
        try:
            descriptor = os.open(Path(folder) / file_name(key, _LOCK), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            return error.strerror or str(error)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return "held"
        except OSError as error:
            os.close(descriptor)
            return error.strerror or str(error)
        self._descriptor = descriptor
        return "taken"

    def drop(self) -> None:
        """Let go of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def remove(folder: str, key: str, index: int) -> None:
    """Leave nothing there of what this machine wrote, nor the lock."""
    for name in (file_name(key, index), file_name(key, index) + ".tmp", file_name(key, _LOCK)):
        with contextlib.suppress(OSError):  # another machine has removed it, or it never was there
            (Path(folder) / name).unlink()


@dataclass(frozen=True)
class Storage:
    """What each machine, by its address, did and saw."""

    folder: str
    errors: Mapping[str, str] = field(default_factory=dict)
    """Of those that could not write."""
    unseen: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By reader: what is wrong with whose file."""
    seen_s: float = 0.0
    """How long the slowest reader took."""
    write_s: float = 0.0
    free_bytes: int = 0
    """The least that any of them sees."""
    locks: Sequence[str] = ()
    """What `take` told those that tried while one held the lock."""
    machines: int = 0


def judge_storage(storage: Storage) -> list[Finding]:
    """Whether all machines share it, with how much room, and whether its locks hold between them."""
    if storage.errors:
        words = in_list(f"{node}: {why}" for node, why in storage.errors.items())
        advice = f"mount the shared storage at {storage.folder} on every machine, writable for the user of Ray"
        return [Finding("storage", "fail", f"cannot be written by {words}", advice)]
    if storage.unseen:
        apart = _apart(storage)
        if apart and len(apart) < storage.machines:
            found = f"{in_list(apart)} and the other {storage.machines - len(apart)} do not see each other's files"
            advice = f"mount the shared storage at {storage.folder} there too"
            return [Finding("storage", "fail", found, advice)]
        words = in_list(
            f"{reader} does not see what {in_list(others)} wrote ({in_list(sorted(set(others.values())))})"
            for reader, others in storage.unseen.items()
        )
        advice = f"{storage.folder} is not the same storage everywhere: mount the shared one there on every machine"
        return [Finding("storage", "fail", words, advice)]
    return [_judge_room(storage), _judge_locks(storage)]


def _apart(storage: Storage) -> list[str]:
    """Those that share nothing with most of the others."""
    pairs = {frozenset((reader, other)) for reader, others in storage.unseen.items() for other in others}
    counts = Counter(node for pair in pairs for node in pair)
    return sorted(node for node, count in counts.items() if 2 * count > storage.machines)


def _judge_room(storage: Storage) -> Finding:
    took = f"written in {storage.write_s:.2g} s, seen in {storage.seen_s:.2g} s"
    who, free = counted(storage.machines, "machine"), in_bytes(storage.free_bytes)
    found = f"written by {who} and read by each; {took}, {free} free"
    if storage.free_bytes < LOW_BYTES:
        level: Level = "fail" if storage.free_bytes < TOO_LOW_BYTES else "warn"
        return Finding("storage", level, found, "make room: checkpoint.keep_last, shoal checkpoints list")
    if storage.seen_s > LATE_S:
        advice = "files are seen late: mount without long attribute caching (actimeo=1 for NFS)"
        return Finding("storage", "warn", found, advice)
    return passed("storage", found)


def _judge_locks(storage: Storage) -> Finding:
    if not storage.locks:
        return Finding("storage locks", "skip", "one machine")
    if set(storage.locks) == {"held"}:
        return passed("storage locks", "a lock of one machine holds on the others")
    if "taken" in storage.locks:
        found = "a lock of one machine does not hold on others"
        advice = (
            "start a run's folder from one machine only: Shoal cannot refuse a second run in it (NFS: local_lock=none)"
        )
        return Finding("storage locks", "warn", found, advice)
    advice = "runs train there, but two of them in one folder are not noticed; mount with locks"
    return Finding("storage locks", "warn", f"no locks: {in_list(sorted(set(storage.locks) - {'held'}))}", advice)
