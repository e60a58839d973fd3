"""A file of JSON lines that somebody else writes: each line is read once, also when the file is replaced by another."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_AT_ONCE_BYTES = 1 << 20
"""A longer line is no record of a run, and is passed over."""
_MARK_BYTES = 64


@dataclass(frozen=True)
class Piece:
    """What was read at once."""

    records: list[dict[str, Any]]
    is_anew: bool = False
    """The file is another one now: what was read before no longer counts."""
    is_behind: bool = False
    """There is more to read."""


class Tail:
    """Remembers how far a file was read. It is opened for every look: that is when shared storage tells news."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.offset = 0
        self._inode = -1
        self._mark = b""
        """The last bytes that were read: a file may be replaced by one that happens to get the same inode."""

    def read(self) -> Piece:
        """The next records, about a megabyte at most; none where the file is missing or cannot be read now."""
        try:
            with self.path.open("rb") as file:
                is_anew = self._is_another(file)
                if is_anew:
                    self.offset, self._mark = 0, b""
                file.seek(self.offset)
                content = file.read(_AT_ONCE_BYTES)
        except OSError:
            return Piece([])
        whole = content.rfind(b"\n") + 1 or (len(content) if len(content) == _AT_ONCE_BYTES else 0)
        self.offset += whole
        self._mark = (self._mark + content[:whole])[-_MARK_BYTES:]
        is_behind = len(content) == _AT_ONCE_BYTES
        return Piece(_records(content[:whole]), is_anew, is_behind)

    def _is_another(self, file: BinaryIO) -> bool:
        stat = os.fstat(file.fileno())
        is_first, is_same = self._inode < 0, stat.st_ino == self._inode and stat.st_size >= self.offset
        self._inode, self.size = stat.st_ino, stat.st_size
        if is_first:
            return False
        if is_same and self._mark:
            file.seek(self.offset - len(self._mark))
            is_same = file.read(len(self._mark)) == self._mark
        return not is_same


def _records(content: bytes) -> list[dict[str, Any]]:
    found = []
    for line in content.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # cut short by a crash, or not JSON at all
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
