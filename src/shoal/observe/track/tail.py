"""New lines of a file that another process writes."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOST_LINES = 500
"""That are read at once: however far behind a sink is, it takes no more memory than these."""


@dataclass
class Tail:
    """Reads a file of JSON lines from where it was before. A file that was replaced or cut is read anew."""

    path: Path
    _position: tuple[int | None, int] = (None, 0)
    """The file, by its number, and how much of it was read."""

    def read(self, up_to: int | None = None) -> list[dict[str, Any]]:
        """Some new lines, those with a step no further than `up_to` if that is given; none where there are none.

        A line without an end is still being written, or was cut short: it is left for later.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            inode, offset = self._position
            if inode != status.st_ino or status.st_size < offset:
                offset = 0
            file.seek(offset)
            found: list[dict[str, Any]] = []
            for line in file:
                record = _parsed(line) if line.endswith(b"\n") else None
                is_ahead = record is not None and up_to is not None and _step(record) > up_to
                if len(found) == _MOST_LINES or is_ahead or not line.endswith(b"\n"):
                    break
                offset += len(line)
                if record is not None:
                    found.append(record)
            self._position = status.st_ino, offset
            return found


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _step(record: dict[str, Any]) -> int:
    step = record.get("step")
    return step if isinstance(step, int) else 0
