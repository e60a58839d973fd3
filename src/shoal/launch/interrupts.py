"""Ctrl-C and SIGTERM: once means stop after this step and save, twice means stop now."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Catches the signals while it is entered; call it to learn whether to stop."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._saved: dict[int, Any] = {}

    def __call__(self) -> str | None:
        """The name of the signal that came, or None."""
        return self.received

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._saved[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._saved.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            # Straight to the file descriptor: the interrupted code may hold the stream's lock.
            os.write(2, b"\x1b[?25h\nstopped at once\n" if os.isatty(2) else b"stopped at once\n")
            os._exit(130)
        self.received = signal.Signals(number).name
        os.write(2, f"\n{self.received}: saving after this step; once more to stop at once\n".encode())
