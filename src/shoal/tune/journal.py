"""The journal of a search: every proposal, result and decision, written down before it is acted upon.

It is the search: a tuner that is killed is one that reads it and goes on.
"""

import contextlib
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from shoal.core.errors import RunError, UserError
from shoal.core.storage import to_json_line

NAME = "journal.jsonl"


class Journal:
    """Lines at the end of a file, each on the disk when `add` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._cut_torn_line()
        self._refusal: RunError | None = None
        """Why a line could not be written. What would come after it does not follow from what is there."""

    def read(self) -> list[dict[str, Any]]:
        """All events so far."""
        return read_journal(self.path.parent)

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write down what happens; the event, as it would be read back."""
        if self._refusal is not None:
            raise self._refusal
        record = {"time": round(time.time(), 3), "event": event, **fields}
        line = to_json_line(record).encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)
            # What is not written down is not decided: the search ends here, and goes on when there is room.
            words = f"{self.path} cannot be written: {error.strerror}; make room, then resume the search"
            self._refusal = RunError(words)
            raise self._refusal from error
        applied: dict[str, Any] = json.loads(line)
        return applied

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _cut_torn_line(self) -> None:
        """A line that a crash cut short was never acted upon."""
        size = os.fstat(self._descriptor).st_size
        content = os.pread(self._descriptor, size, 0)
        whole = content.rfind(b"\n") + 1
        if whole < size:
            os.ftruncate(self._descriptor, whole)


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The events of a search; a last line that a crash cut short is left out, any other that is damaged is refused."""
    lines = (folder / NAME).read_bytes().split(b"\n") if (folder / NAME).is_file() else []
    events = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            event = json.loads(line)
            assert isinstance(event["event"], str)
        except (ValueError, TypeError, KeyError, AssertionError):
            raise UserError(
                f"{folder / NAME}: line {number} is damaged; bring the file back from a copy, or start a new search"
            ) from None
        events.append(event)
    return events
