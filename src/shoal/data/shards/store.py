"""Where shards are: files of this machine as they are; files of an object store in a cache on disk, with a cap."""

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import filelock
import xxhash

from shoal.core.errors import UserError
from shoal.core.remote import Access, Remote, RemoteError
from shoal.core.storage import NO_ROOM
from shoal.data.bad_samples import DataGoneError
from shoal.data.shards.index import Shard, ShardIndex
from shoal.data.shards.opened import RowError
from shoal.data.statistics import DataStatistics

Tell = Callable[[str], None]
_TOLD_AFTER_S = 5.0
"""A file that takes longer is told of, and again and again after as long."""
_PAUSE_S = 2.0
_ACCESS = Access("data.dir", timeout_s=15.0, tries=1)  # whatever fails is tried again here, where it is told of
_CHUNK = 1 << 20
_LOCKED_S = 30.0
_FETCHERS = 4
_FILES_AHEAD = 2 * _FETCHERS
"""Files that are fetched ahead however many steps they will do for."""
_REMEMBERED = 1000
_LONG_AGO = 1 << 60
CACHE = "shoal-shards"
"""The folder of the cache that is ours: users keep other things beside it."""
_OURS = re.compile(r"[0-9a-f]{24}")
_FULL = 0.9
"""When files are deleted, down to this share of the cap, so that it need not be done for each."""
_SHARED_BY = 8
_LEFTOVER_S = 3600.0
"""Files half fetched that are older than this belong to nobody."""
_WRONG_BYTES_TRIES = 2


class Store(Protocol):
    """Brings a shard to this machine."""

    def path(self, number: int) -> Path:
        """The file of a shard, whole; raises RowError where it is not to be had."""
        ...

    def where(self, number: int) -> str:
        """Its address, for messages."""
        ...


class LocalStore:
    """Shards that are files of this machine."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        self.folder = folder
        self.index = index

    def path(self, number: int) -> Path:
        """Where it is."""
        path = self.folder / self.index.shards[number].file
        if not path.is_file():
            raise RowError("the file is not there")
        return path

    def where(self, number: int) -> str:
        """The same in words."""
        return str(self.folder / self.index.shards[number].file)


class CachedStore:
    """Shards of an object store. Goes to other processes whole; each has a connection of its own."""

    def __init__(self, url: str, index: ShardIndex, *, cache: Path, cache_bytes: int, patience_s: float) -> None:
        self.url = url.rstrip("/")
        self.index = index
        self.cache_bytes = cache_bytes
        self.patience_s = patience_s
        # Other data at the same address has another index, and must not be taken for this.
        name = hashlib.sha256(f"{self.url}\n{index.to_json()}".encode()).hexdigest()[:24]
        self.cache = cache / CACHE
        self.folder = self.cache / name
        self._remote: Remote | None = None
        self._process = -1
        self._room = 0
        self._making_room: tuple[int, threading.Lock] = (-1, threading.Lock())
        self._counted_in: tuple[int, DataStatistics] | None = None
        """The process that files are followed in, and what it counts in: one that has to read before they were
        fetched ahead counts there too."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._remote, self._process, self._room, self._making_room = None, -1, 0, (-1, threading.Lock())
        self._counted_in = None

    def _lock(self) -> threading.Lock:
        """A lock of this process: a fork copies one as it is, also one that another thread has just taken."""
        if self._making_room[0] != os.getpid():
            self._making_room = (os.getpid(), threading.Lock())
        return self._making_room[1]

    @property
    def remote(self) -> Remote:
        """The connection of this process; one that a fork has copied is of no use."""
        if self._remote is None or self._process != os.getpid():
            self._remote, self._process = Remote(self.url, _ACCESS), os.getpid()
        return self._remote

    def where(self, number: int) -> str:
        """Its address in the store."""
        return f"{self.url}/{self.index.shards[number].file}"

    def path(self, number: int) -> Path:
        """The file in the cache; fetched now where nobody has done so before."""
        path = self._path(number)
        return path if self._is_whole(number) else self.fetch(number, self._statistics(), lambda words: None)

    def _statistics(self) -> DataStatistics:
        """Where this process counts; in one that a fork has made, nowhere."""
        process, statistics = self._counted_in or (-1, None)
        return statistics if statistics is not None and process == os.getpid() else DataStatistics()

    def _is_whole(self, number: int) -> bool:
        """Whether a shard is in the cache, and as long as it should be: a power cut may leave less."""
        try:
            return self._path(number).stat().st_size == self.index.shards[number].bytes
        except OSError:
            return False

    def _path(self, number: int) -> Path:
        return self.folder / self.index.shards[number].file

    def fetch(self, number: int, statistics: DataStatistics, tell: Tell) -> Path:
        """Bring a shard here, by one process of this machine while the others wait for it."""
        path = self._path(number)
        waited = _Waiting(self.where(number), tell)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), thread_local=False)
        # Who holds the lock has as much patience as we have; one that holds it for longer may never let go of it.
        while waited.seconds < self.patience_s + _LOCKED_S and not self._is_whole(number):
            try:
                lock.acquire(timeout=_PAUSE_S)
                break
            except filelock.Timeout:
                waited.tell("another process fetches it")
        try:
            if not self._is_whole(number):
                self._fetch(number, path, statistics, waited)
            waited.over()
            return path
        finally:
            lock.release()

    def _fetch(self, number: int, path: Path, statistics: DataStatistics, waited: "_Waiting") -> None:
        shard, wrong = self.index.shards[number], 0
        aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        while True:
            try:
                self._make_room(shard.bytes)
                self.remote.get(shard.file, aside)
                if (why := _difference(aside, shard)) is None:
                    _sync(aside)
                    aside.replace(path)
                    statistics.add(files_fetched=1, bytes_fetched=shard.bytes)
                    return
                wrong += 1
                if wrong > _WRONG_BYTES_TRIES:
                    raise RowError(why)
            except RemoteError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    raise RowError("the file is not there") from error
                why = str(error)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                why = f"{self.cache}: {error.strerror}"
            finally:
                aside.unlink(missing_ok=True)
            statistics.add(retries=1)
            if waited.seconds > self.patience_s:
                raise DataGoneError(
                    f"data.dir: {self.where(number)} could not be had for {waited.seconds:.0f} s: {why}; "
                    "raise data.patience_s to wait longer, then go on with --resume"
                )
            waited.tell(why)
            time.sleep(min(_PAUSE_S, self.patience_s))

    def _make_room(self, needed: int) -> None:
        """Delete what was used longest ago, where there is no room under the cap. Who still reads a file keeps it.

        The cache is looked through now and then, when a good part of the room that was found has been used up; the
        other processes of the machine use it up too.
        """
        with self._lock():
            self._room -= needed
            if self._room >= 0:
                return
            files, total = [], needed
            for path, size, used in _cached_files(self.cache):
                if not path.name.startswith("."):
                    files.append((used, size, path))
                    total += size
                elif path.name.endswith(".tmp") and time.time() - used > _LEFTOVER_S:
                    path.unlink(missing_ok=True)
            if total > self.cache_bytes:
                for _, size, path in sorted(files):
                    path.unlink(missing_ok=True)
                    total -= size
                    if total <= _FULL * self.cache_bytes:
                        break
            self._room = max(0, self.cache_bytes - total) // _SHARED_BY

    @contextlib.contextmanager
    def following(
        self, files: Iterator[tuple[int, list[int]]], steps_ahead: int, statistics: DataStatistics, tell: Tell
    ) -> Iterator["Follower"]:
        """Inside, shards are brought here before they are needed: in the order that `files` gives them, each with the
        step that needs it, `steps_ahead` of the step that the loop is at."""
        follower = Follower(self, files, steps_ahead, statistics, tell)
        before, self._counted_in = self._counted_in, (os.getpid(), statistics)
        try:
            yield follower
        finally:
            self._counted_in = before
            follower.close()

    def use(self, number: int) -> bool:
        """Mark a shard as used now; False where it is not in the cache."""
        if not self._is_whole(number):
            return False
        with contextlib.suppress(FileNotFoundError):  # another process may just have deleted it
            os.utime(self._path(number))
        return True


class Follower:
    """Threads that fetch shards in the order of need, some steps ahead of the step that the loop is at."""

    def __init__(
        self,
        store: CachedStore,
        files: Iterator[tuple[int, list[int]]],
        steps_ahead: int,
        statistics: DataStatistics,
        tell: Tell,
    ) -> None:
        self._store, self._statistics, self._tell = store, statistics, tell
        self._files = ((step, number) for step, numbers in files for number in numbers)
        self._steps_ahead = steps_ahead
        self._changed = threading.Condition()
        self._step: int | None = None
        """Where the loop is; None before the first step, whose files are fetched at once."""
        self._ahead: list[int] = []
        """Steps that the files which were taken up are for."""
        self._recent: dict[int, int] = {}
        """The step that each of the files last taken up was for."""
        self._is_over = False
        self._threads = [threading.Thread(target=self._run, name="fetch-shards", daemon=True) for _ in range(_FETCHERS)]
        for thread in self._threads:
            thread.start()

    def at(self, step: int) -> None:
        """The loop has come to this step."""
        with self._changed:
            self._step = step
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads; a file that one is at is waited for only shortly, since a store may be silent."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _run(self) -> None:
        while (number := self._next()) is not None:
            if self._store.use(number):
                self._statistics.add(files_at_hand=1)
                continue
            # What goes wrong for good comes up again where the shard is read, and is told there.
            with contextlib.suppress(RowError, UserError, OSError):
                self._store.fetch(number, self._statistics, self._tell)

    def _next(self) -> int | None:
        """The next file that it is time for, or None when there are no more."""
        with self._changed:
            while not self._is_over:
                found = next(self._files, None)
                if found is None:
                    return None
                step, number = found
                if step - self._recent.get(number, -_LONG_AGO) <= self._steps_ahead:  # another lane's, or window's
                    continue
                self._changed.wait_for(lambda step=step: self._is_over or self._is_time(step))  # type: ignore[misc]
                self._ahead.append(step)
                self._recent.pop(number, None)
                self._recent[number] = step
                if len(self._recent) > _REMEMBERED:
                    del self._recent[next(iter(self._recent))]
                return None if self._is_over else number
        return None

    def _is_time(self, step: int) -> bool:
        at = self._step if self._step is not None else 0
        self._ahead = [other for other in self._ahead if other > at]
        return step <= at + self._steps_ahead or len(self._ahead) < _FILES_AHEAD


class _Waiting:
    """Tells of a file that is long in coming, now and again, and that it came."""

    def __init__(self, where: str, tell: Tell) -> None:
        self._where, self._tell = where, tell
        self._began = self._told = time.monotonic()
        self._was_told = False

    @property
    def seconds(self) -> float:
        """Since it was first asked for."""
        return time.monotonic() - self._began

    def tell(self, why: str) -> None:
        """Say it, unless it was said a moment ago."""
        if time.monotonic() - self._told >= _TOLD_AFTER_S:
            self._told, self._was_told = time.monotonic(), True
            self._tell(f"waiting for data for {self.seconds:.0f} s: {self._where}: {why}")

    def over(self) -> None:
        """It is there."""
        if self._was_told:
            self._tell(f"data is there again after {self.seconds:.0f} s: {self._where}")


def _sync(path: Path) -> None:
    """The bytes are on the disk before the name is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _difference(path: Path, shard: Shard) -> str | None:
    """What is wrong with a file that was fetched, by the index."""
    size = path.stat().st_size
    if size != shard.bytes:
        return f"has {size:,} bytes, and the index says {shard.bytes:,}"
    if shard.xxh3_128 is not None and hash_of(path) != shard.xxh3_128:
        return "the bytes are not those that the index was made from"
    return None


def hash_of(path: Path) -> str:
    """xxh3_128 of a file's bytes, in hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _cached_files(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Every file that a store has put below the cache's folder: path, size, when it was last used."""
    own = [entry for entry in folder.iterdir() if _OURS.fullmatch(entry.name)] if folder.is_dir() else []
    for root, _, names in (found for entry in own for found in os.walk(entry)):
        for name in names:
            path = Path(root, name)
            with contextlib.suppress(FileNotFoundError):  # another process may have deleted it
                about = path.stat()
                yield path, about.st_size, about.st_mtime
