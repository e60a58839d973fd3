"""Where shards are written to and looked at: a folder of this machine, or one in an object store."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from shoal.core.errors import RunError, UserError
from shoal.core.remote import Access, Remote, RemoteError
from shoal.core.storage import NO_ROOM, expand_home, fsync_directory, write_atomically

MARKER = ".shoal-writing"
"""In a folder whose shards are being written, or whose writer was killed."""


class Folder(Protocol):
    """Files of one folder, flat."""

    address: str
    """For messages."""

    def names(self) -> set[str]:
        """Of the files and folders in it; none, if it is not there."""

    def read(self, name: str) -> bytes | None:
        """The content of a small file, or None if there is none."""

    def write(self, name: str, text: str) -> None:
        """A small file, whole or not at all."""

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""

    def new_file(self, name: str) -> AbstractContextManager[Path]:
        """A path to write to; when left without an error, what was written is in the folder, whole, as `name`."""

    def here(self, name: str) -> AbstractContextManager[Path]:
        """A file of the folder, on this machine, until left."""

    def claim(self) -> None:
        """Put the marker there; an error if another process is writing."""

    def release(self) -> None:
        """Take the marker away, and the folder too if there is nothing in it."""

    def at(self, part: str) -> "Folder":
        """The folder `part` in this one; this one for an empty name."""


def open_folder(address: str, field: str) -> Folder:
    """The folder at a path or at an address such as s3://bucket/folder; `field` names it in messages."""
    if address.startswith("file://"):
        address = address.removeprefix("file://")
    if "://" in address:
        return RemoteFolder(Remote(address, Access(field)), field)
    path = expand_home(address)
    there = next(found for found in (path, *path.absolute().parents) if found.exists())
    if not there.is_dir():
        raise UserError(f"{field}: {there} is a file; give a folder")
    return LocalFolder(path)


@contextmanager
def failures_told(field: str) -> Iterator[None]:
    """A store that does not answer and a disk that is full as errors with words."""
    try:
        yield
    except RemoteError as error:
        raise RunError(f"{field}: {error}; check address and credentials, then try again") from error
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise RunError(
            f"{field}: {where}{error.strerror}; no index was written. Make room, or take another folder, and try again"
        ) from error


class LocalFolder:
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.address = str(path)
        self._lock: FileLock | None = None
        self._made: list[Path] = []

    def names(self) -> set[str]:
        """Of the files and folders in it; none, if it is not there."""
        return {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()

    def read(self, name: str) -> bytes | None:
        """The content of a small file, or None if there is none."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, text: str) -> None:
        """A small file, whole or not at all."""
        write_atomically(self.path / name, text)

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""
        (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def new_file(self, name: str) -> Iterator[Path]:
        """Written aside, and renamed when it is on the disk."""
        part = self.path / f".{name}.part"
        try:
            yield part
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(self.path / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        fsync_directory(self.path)

    @contextmanager
    def here(self, name: str) -> Iterator[Path]:
        """The file itself."""
        yield self.path / name

    def claim(self) -> None:
        """The marker is a lock as well, which the system lets go of when its process dies."""
        self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        lock = FileLock(self.path / MARKER)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(f"DST: {self.path} is being written by another process; wait for it to end") from error
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            raise UserError(f"DST: {self.path}: {error.strerror}; give a folder that can be written to") from error
        self._lock = lock

    def release(self) -> None:
        """Taken away while still held, so that nobody can hold the old one."""
        if self._lock is not None:
            (self.path / MARKER).unlink(missing_ok=True)
            self._lock.release()
            self._lock = None
        with suppress(OSError):  # one that holds something stays, and so do those around it
            for path in self._made:
                path.rmdir()

    def at(self, part: str) -> "LocalFolder":
        """The folder `part` in this one; this one for an empty name."""
        return LocalFolder(self.path / part) if part else self


class RemoteFolder:
    """A folder in an object store. Files pass through this machine's temporary folder, one at a time."""

    def __init__(self, remote: Remote, field: str) -> None:
        self.remote = remote
        self.field = field
        self.address = remote.url

    def names(self) -> set[str]:
        """Of the files and folders in it; none, if it is not there."""
        return set(self.remote.names(""))

    def read(self, name: str) -> bytes | None:
        """The content of a small file, or None if there is none."""
        return self.remote.read(name)

    def write(self, name: str, text: str) -> None:
        """A small file, whole or not at all."""
        with self.new_file(name) as path:
            path.write_text(text, encoding="utf-8")

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""
        self.remote.delete(name)

    @contextmanager
    def new_file(self, name: str) -> Iterator[Path]:
        """Uploaded when it is whole; a store shows no halves."""
        with tempfile.TemporaryDirectory(prefix="shoal-shards-") as folder:
            path = Path(folder) / name
            yield path
            self.remote.put(path, name)

    @contextmanager
    def here(self, name: str) -> Iterator[Path]:
        """A copy."""
        with tempfile.TemporaryDirectory(prefix="shoal-shards-") as folder:
            path = Path(folder) / name.rpartition("/")[2]
            self.remote.get(name, path)
            yield path

    def claim(self) -> None:
        """Stores have no locks: the marker only tells that what is there is not whole."""
        self.write(MARKER, "Shards are being written here, or their writer was killed.\n")

    def release(self) -> None:
        """Take the marker away."""
        self.delete(MARKER)

    def at(self, part: str) -> "RemoteFolder":
        """The folder `part` in this one; this one for an empty name."""
        if not part:
            return self
        return RemoteFolder(Remote(f"{self.remote.url}/{part}", Access(self.field)), self.field)
