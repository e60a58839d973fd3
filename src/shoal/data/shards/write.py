"""Writing shards: each file aside and renamed when whole, its hash taken as it is written, the index last."""

import io
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import IO, Any, TypeVar

import numpy as np
import xxhash

from shoal.core.errors import UserError
from shoal.core.imports import require
from shoal.core.remote import RemoteError
from shoal.data.shards.folder import MARKER, Folder, RemoteFolder
from shoal.data.shards.index import INDEX, Shard, ShardIndex

T = TypeVar("T")
SUFFIXES = {"tar": ".tar", "jsonl": ".jsonl", "parquet": ".parquet", "tokens": ".bin"}
"""How the files of a format that can be written end."""
TOKENIZER = "tokenizer.json"
_OURS = re.compile(r"\.?shard-\d{5,}\.(tar|jsonl|parquet|bin)(\.part)?")
_ROW_GROUP_BYTES = 8 << 20


class HashedFile(io.RawIOBase):
    """A file that knows the hash of what was written to it, and how many rows its writer says that is."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self.rows = 0
        self.num_bytes = 0
        self._file = file
        self._hash = xxhash.xxh3_128()

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, content: Any) -> int:
        """All of it, always."""
        self._hash.update(content)
        self._file.write(content)
        size = memoryview(content).nbytes
        self.num_bytes += size
        return size

    def tell(self) -> int:
        """Bytes written; tar and Parquet note where things are."""
        return self.num_bytes

    def shard(self, name: str) -> Shard:
        """What the index says of it."""
        return Shard(name, self.rows, self.num_bytes, self._hash.hexdigest())


class ShardWriter:
    """The shards of one folder, one after the other. Made by `writing`, which writes the index."""

    def __init__(self, folder: Folder, format_: str, tell: Callable[[Shard], None]) -> None:
        self.folder = folder
        self.format = format_
        self.about: dict[str, Any] = {}
        """For the index."""
        self.beside: dict[str, str] = {}
        """Small files that go beside the index: name and content."""
        self._shards: list[Shard] = []
        self._tell = tell

    @contextmanager
    def new_shard(self) -> Iterator[HashedFile]:
        """The next file, which counts when it is left without an error."""
        name = f"shard-{len(self._shards):05d}{SUFFIXES[self.format]}"
        with self.folder.new_file(name) as path, path.open("wb") as file:
            hashed = HashedFile(file)
            yield hashed
        self._shards.append(hashed.shard(name))
        self._tell(self._shards[-1])

    def index(self) -> ShardIndex:
        """All that was written."""
        return ShardIndex(self.format, tuple(self._shards), self.about)


@contextmanager
def writing(
    target: Folder, parts: Iterable[str], format_: str, overwrite: bool, tell: Callable[[Shard], None]
) -> Iterator[dict[str, ShardWriter]]:
    """A writer for each part of a dataset (a folder in `target`, or itself for ""); indexes are written at the end.

    When an error ends it, what was written is taken away. When the process is killed, there is no index, and a marker
    tells the next writer that the shards are nobody's.
    """
    folders = {part: target.at(part) for part in parts}
    _check_target(target, folders, overwrite)
    writers = {part: ShardWriter(folder, format_, tell) for part, folder in folders.items()}
    with ExitStack() as claims:
        for folder in folders.values():
            folder.claim()
            claims.callback(_quietly, folder.release)
        try:
            for folder in folders.values():
                _clear(folder)
            yield writers
            for writer in writers.values():
                for name, text in writer.beside.items():
                    writer.folder.write(name, text)
            for writer in writers.values():
                writer.folder.write(INDEX, writer.index().to_json())
        except BaseException:
            for folder in folders.values():
                _quietly(partial(_clear, folder))
            raise


def _check_target(target: Folder, folders: dict[str, Folder], overwrite: bool) -> None:
    for other in ("", "train", "val"):
        folder = target.at(other)
        if other not in folders and INDEX in folder.names():
            raise UserError(
                f"DST: {folder.address} holds another dataset, and {' and '.join(folders) or 'this one'} cannot lie "
                "beside it; give another folder"
            )
    names = {part: folder.names() for part, folder in folders.items()}
    whole = [folders[part].address for part, found in names.items() if INDEX in found]
    # A writer that was killed between two indexes has left its marker.
    was_killed = len(whole) < len(folders) and any(MARKER in found for found in names.values())
    if overwrite or was_killed:
        return
    if whole:
        raise UserError(f"DST: {whole[0]} already has an {INDEX}; --overwrite replaces what is there")
    for part, found in names.items():
        shards = sorted(name for name in found if _OURS.fullmatch(name))
        if shards:
            raise UserError(
                f"DST: {folders[part].address} holds {shards[0]}, without an index; --overwrite deletes it and its "
                "like, shoal data index makes an index"
            )


def _clear(folder: Folder) -> None:
    """Delete the index first, so that what is half deleted does not look whole."""
    folder.delete(INDEX)
    for name in sorted(folder.names()):
        if _OURS.fullmatch(name):
            folder.delete(name)
    if isinstance(folder, RemoteFolder):
        with suppress(RemoteError):  # not everybody may: it costs money, and nothing else
            folder.remote.abort_unfinished()


def _quietly(action: Callable[[], None]) -> None:
    """On the way out: what cannot be taken away now is taken away by the next writer."""
    with suppress(OSError, RemoteError):
        action()


def by_size(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[Iterator[T]]:
    """Runs of items that add up to `limit` at most; an item larger than that is a run of its own.

    A run must be read before the next one is asked for.
    """
    number = used = 0

    def run_of(item: T) -> int:
        nonlocal number, used
        size = size_of(item)
        if used and used + size > limit:
            number, used = number + 1, 0
        used += size
        return number

    return (run for _, run in groupby(items, run_of))


Sample = list[tuple[str, bytes]]
"""The members of one sample in a tar: names after the key, such as `.jpg`, and contents."""


def write_tar(writer: ShardWriter, samples: Iterable[Sample], shard_bytes: int) -> None:
    """Tars as WebDataset has them: the members of a sample lie together and share a key, its number."""
    number = 0
    for run in by_size(samples, lambda sample: sum(len(content) for _, content in sample), shard_bytes):
        with writer.new_shard() as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for sample in run:
                for suffix, content in sample:
                    member = tarfile.TarInfo(f"{number:09d}{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                number += 1
                file.rows += 1


def write_jsonl(writer: ShardWriter, lines: Iterable[bytes], shard_bytes: int) -> None:
    """JSON lines; the lines come without their ends."""
    for run in by_size(lines, lambda line: len(line) + 1, shard_bytes):
        with writer.new_shard() as file:
            for line in run:
                file.write(line + b"\n")
                file.rows += 1


def write_parquet(writer: ShardWriter, tables: Iterable[Any], shard_bytes: int) -> None:
    """Parquet with small row groups, so that a reader can skip to one; sizes are before compression."""
    parquet = require("pyarrow.parquet", "--format", "parquet")
    small = (part for table in tables for part in _row_groups(table, min(_ROW_GROUP_BYTES, shard_bytes)))
    for run in by_size(small, lambda table: int(table.nbytes), shard_bytes):
        with writer.new_shard() as file, ExitStack() as closing:
            to: Any = None
            for table in run:
                to = to or closing.enter_context(parquet.ParquetWriter(file, table.schema, compression="zstd"))
                to.write_table(table, row_group_size=len(table))
                file.rows += len(table)


def _row_groups(table: Any, num_bytes: int) -> Iterator[Any]:
    """A table in slices of about `num_bytes`."""
    rows = max(1, int(len(table) * num_bytes / max(1, table.nbytes)))
    for start in range(0, len(table), rows):
        yield table.slice(start, rows)


def write_tokens(writer: ShardWriter, rows: Iterable[np.ndarray]) -> None:
    """Little-endian ids, nothing else; each array becomes a file."""
    for ids in rows:
        with writer.new_shard() as file:
            file.write(ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes())
            file.rows = len(ids)
