"""Lines that another process writes, as they come."""

import os

LONGEST_PRINT = 10_000
"""Bytes that are shown of a line that somebody prints."""


class Lines:
    """What comes in at a descriptor, in whole lines; at most `longest` bytes of each are kept."""

    def __init__(self, descriptor: int, longest: int | None = None) -> None:
        self.longest = longest
        self.is_open = True
        """Whether more may come."""
        self._descriptor = descriptor
        self._rest = b""

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def read(self) -> list[str]:
        """The lines that are whole by now. Waits only if the descriptor does."""
        try:
            raw = os.read(self._descriptor, 1 << 20)
        except BlockingIOError:
            return []
        except OSError:  # a reset is an end too
            raw = b""
        self.is_open = self.is_open and bool(raw)
        *whole, self._rest = (self._rest + raw).split(b"\n")
        if self.longest is not None and len(self._rest) > self.longest:
            self._rest = _as_shown(self._rest)[: self.longest]
        return [self._text(line) for line in whole]

    def rest(self) -> list[str]:
        """What came after the last whole line, as one; nothing if there is nothing."""
        rest, self._rest = self._rest, b""
        return [self._text(rest)] if rest else []

    def _text(self, line: bytes) -> str:
        return _as_shown(line)[: self.longest].decode(errors="replace")


def _as_shown(line: bytes) -> bytes:
    """What a terminal would show at the end: a progress bar starts its line again and again."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
