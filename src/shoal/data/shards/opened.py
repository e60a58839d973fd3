"""One shard, opened: its rows by number, each as columns by name. A file is read where a row is, never whole."""

import itertools
import json
import os
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shoal.core.imports import require

_BLOCK = 512
_CHUNK = 1 << 20
_LONGEST_NAME = 1 << 20
HELD_BYTES = 256 << 20
"""Decoded row groups of parquet files that a process keeps, by their size."""
_HELD = 4
"""And as many at least: a window that lies across two would decode them again for every row."""


class RowError(Exception):
    """A row cannot be read, and why; and what to do, where it is not that the file is damaged."""

    def __init__(self, why: str, remedy: str | None = None) -> None:
        super().__init__(why)
        self.remedy = remedy


class OpenShard(ABC):
    """A file of rows. Closed by whoever opened it."""

    @abstractmethod
    def __len__(self) -> int:
        """Rows that were found in it."""

    @abstractmethod
    def row(self, number: int) -> dict[str, Any]:
        """The columns of a row; raises RowError."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""


class _Bytes(OpenShard):
    """Read by position rather than mapped: mapped pages would count as memory of this process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._descriptor).st_size
        try:
            self._scan(path)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _scan(self, path: Path) -> None:
        """Find the rows."""

    def _read(self, offset: int, length: int) -> bytes:
        content = os.pread(self._descriptor, length, offset) if offset + length <= self._size else b""
        if len(content) != length:
            raise RowError(f"the file ends too early: {self._size:,} bytes, and the row goes on to {offset + length:,}")
        return content

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


class TarShard(_Bytes):
    """A tar as webdataset writes it: members of one name up to the first dot are a row, what follows is the column."""

    def __len__(self) -> int:
        return len(self._rows)

    def _scan(self, path: Path) -> None:
        self._rows: list[dict[str, tuple[int, int]]] = []
        offset, key, long_name = 0, None, None
        while len(header := os.pread(self._descriptor, _BLOCK, offset)) == _BLOCK and header.strip(b"\0"):
            kind, size = header[156:157], _octal(header[124:136])
            if size is None or not _checksum_is_right(header):
                return  # not a header: what is beyond cannot be found
            data = offset + _BLOCK
            offset = data + -(-size // _BLOCK) * _BLOCK
            if kind in (b"L", b"x"):
                if size > _LONGEST_NAME:
                    return
                long_name = _long_name(kind, os.pread(self._descriptor, size, data))
            elif kind in (b"0", b"\0"):
                name, long_name = long_name or _name(header), None
                folder, _, base = name.rpartition("/")
                stem, _, column = base.partition(".")
                if not stem:
                    continue
                if key != (folder, stem):
                    key = (folder, stem)
                    self._rows.append({})
                self._rows[-1][column.lower()] = (data, size)

    def row(self, number: int) -> dict[str, Any]:
        """The bytes of each member."""
        if number >= len(self._rows):
            raise RowError(f"the file ends too early, or is damaged, after {len(self._rows)} rows")
        return {column: self._read(*place) for column, place in self._rows[number].items()}


def _octal(field: bytes) -> int | None:
    if field[:1] == b"\x80":  # GNU's way for sizes of 8 GiB and more
        return int.from_bytes(field[-8:], "big") & (1 << 62) - 1
    digits = field.strip(b" \0")
    return int(digits or b"0", 8) if not digits.strip(b"01234567") else None


def _checksum_is_right(header: bytes) -> bool:
    return _octal(header[148:156]) == sum(header[:148]) + 8 * ord(" ") + sum(header[156:])


def _name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    if header[345] and header[257:263] == b"ustar\0":
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return name.decode("utf-8", "replace")


def _long_name(kind: bytes, content: bytes) -> str | None:
    """The name that a header before the member's own gives, in GNU's way or that of POSIX."""
    if kind == b"L":
        return content.partition(b"\0")[0].decode("utf-8", "replace")
    while content:
        length, _, _ = content.partition(b" ")
        if not length.isdigit() or not int(length):
            return None
        record, content = content[: int(length)], content[int(length) :]
        key, _, value = record[len(length) + 1 : -1].partition(b"=")
        if key == b"path":
            return value.decode("utf-8", "replace")
    return None


class JsonLinesShard(_Bytes):
    """A JSON object a line; empty lines are no rows."""

    def __len__(self) -> int:
        return len(self._starts)

    def _scan(self, path: Path) -> None:
        self._starts, self._ends = line_bounds(path)

    def row(self, number: int) -> dict[str, Any]:
        """The object."""
        if number >= len(self._starts):
            raise RowError(f"the file ends too early, after {len(self._starts)} rows")
        start, end = int(self._starts[number]), int(self._ends[number])
        try:
            row = json.loads(self._read(start, end - start))
        except (ValueError, RecursionError) as error:
            raise RowError(f"is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise RowError(f"is a {type(row).__name__}, not an object of columns")
        return row


def line_bounds(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Where every line that is not empty starts and ends; the file is gone through once, a piece at a time."""
    found = []
    size = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            found.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + size)
            size += len(chunk)
    ends = np.concatenate([*found, [size]]) if found else np.array([size])
    starts = np.concatenate([[0], ends[:-1] + 1])
    is_row = ends - starts > 1  # no line of a single byte is a JSON object
    return starts[is_row], ends[is_row]


class ParquetShard(OpenShard):
    """A parquet file, of which whole row groups are decoded; the newest stay, for the rows that are read next."""

    _held: ClassVar["OrderedDict[tuple[int, int], tuple[Any, int]]"] = OrderedDict()
    """Of all files of this process: (number of the opened file, group) -> rows, bytes."""
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, path: Path) -> None:
        parquet = require("pyarrow.parquet", "data.dir", "parquet")
        try:
            self._file = parquet.ParquetFile(path, memory_map=False)
        except Exception as error:
            # Of Arrow's many kinds; a file that is cut short has lost its footer, and with it all rows.
            raise RowError(f"is not a whole parquet file ({_first_line(error)})") from error
        self._number = next(ParquetShard._numbers)  # never the same again, as an address in memory may be
        weakref.finalize(self, _let_go, self._number).atexit = False
        about = self._file.metadata
        counts = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, number: int) -> dict[str, Any]:
        """The columns as Python values; bytes stay bytes."""
        if number >= len(self):
            raise RowError(f"has {len(self)} rows")
        group = int(np.searchsorted(self._starts, number, side="right")) - 1
        table = self._group(group)
        place = number - int(self._starts[group])
        return {name: table.column(name)[place].as_py() for name in table.column_names}

    def _group(self, group: int) -> Any:
        held, key = ParquetShard._held, (self._number, group)
        if key in held:
            held.move_to_end(key)
            return held[key][0]
        try:
            table = self._file.read_row_group(group, use_threads=False)
        except Exception as error:
            raise RowError(f"row group {group} cannot be read ({_first_line(error)})") from error
        held[key] = (table, table.nbytes)
        while len(held) > _HELD and sum(size for _, size in held.values()) > HELD_BYTES:
            held.popitem(last=False)
        return table

    def close(self) -> None:
        """Let go of the file and of what was decoded of it."""
        _let_go(self._number)
        self._file.close()


def _let_go(number: int) -> None:
    for key in [key for key in ParquetShard._held if key[0] == number]:
        ParquetShard._held.pop(key, None)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class FileShard(OpenShard):
    """A file that is one row: an image in the folder of its class."""

    def __init__(self, path: Path) -> None:
        self._row = {"content": path.read_bytes(), "folder": path.parent.name}

    def __len__(self) -> int:
        return 1

    def row(self, number: int) -> dict[str, Any]:
        """Its bytes, and the name of the folder it is in."""
        return self._row

    def close(self) -> None:
        """Nothing is open."""


OPEN: dict[str, Callable[[Path], OpenShard]] = {
    "tar": TarShard,
    "jsonl": JsonLinesShard,
    "parquet": ParquetShard,
    "folder": FileShard,
}
