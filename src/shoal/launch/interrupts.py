"""Ctrl-C and SIGTERM: once means stop after this step and save, twice means stop now."""

import multiprocessing
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from shoal.core.storage import to_json_line


class Interrupts:
    """Catches the signals while it is entered; call it to learn whether to stop."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
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
            self._say("stopped at once", prefix="\x1b[?25h\n")
            for child in multiprocessing.active_children():  # loader workers, which signals do not reach
                child.kill()
            os._exit(130)
        self.received = signal.Signals(number).name
        self._say(f"{self.received}: saving after this step; once more to stop at once", prefix="\n")

    def _say(self, message: str, prefix: str) -> None:
        """Straight to the file descriptor: the interrupted code may hold the stream's lock."""
        if self.as_json:
            record = {"time": time.time(), "event": "log", "level": "warning", "logger": "shoal", "message": message}
            text = to_json_line(record)
        else:
            # On a terminal: out of the bar's line, and with the cursor that the bar hides.
            text = (prefix if os.isatty(2) else "") + message
        os.write(2, f"{text}\n".encode())
