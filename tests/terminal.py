"""A real pseudo-terminal, and what was shown on it."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator


class Terminal:
    """What a process writes to when a person sits in front of it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the last writer has gone
            while chunk := os.read(self.master, 4096):
                self._shown += chunk

    def stream(self) -> io.TextIOWrapper:
        """For a process to write to."""
        return io.TextIOWrapper(os.fdopen(os.dup(self.slave), "wb", buffering=0), encoding="utf-8", write_through=True)

    def close(self) -> str:
        """Everything that was shown, escape sequences and all."""
        if self.slave >= 0:
            os.close(self.slave)
            self._reader.join()
            os.close(self.master)
            self.slave = -1
        return self._shown.decode()


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    """A terminal that is closed whatever happens."""
    screen = Terminal()
    try:
        yield screen
    finally:
        screen.close()
