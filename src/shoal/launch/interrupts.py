"""Ctrl-C, SIGTERM and a closed terminal: once means stop after this step and save, twice means stop now.

Before the first step there is nothing to save, and once is enough.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Literal

from shoal.core.storage import to_json_line

_SAME_S = 0.5

Phase = Literal["starting", "building", "training"]
"""What a signal comes into: a launcher that starts workers and looks by itself; this process as it builds what a run
needs, anywhere in which it may be ended; steps."""


class Interrupts:
    """Catches the signals while it is entered; call it to learn whether to stop."""

    def __init__(self, as_json: bool = False, is_silent: bool = False) -> None:
        self.as_json = as_json
        self._is_told_elsewhere = False
        self.is_silent = is_silent
        self.received: str | None = None
        self.phase: Phase = "starting"
        self._first = 0.0
        self._saved: dict[int, Any] = {}

    def __call__(self) -> str | None:
        """The name of the signal that came, or None."""
        return self.received

    def tell_elsewhere(self) -> None:
        """There is a display now, which lines of others would tear apart: it tells of the first signal itself."""
        self._is_told_elsewhere = True

    def enter(self, phase: Phase) -> None:
        """What the run does from now on."""
        self.phase = phase
        if phase == "building" and self.received is not None:
            raise KeyboardInterrupt

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    self._saved[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._saved.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None and now - self._first < _SAME_S:
            return  # the same one again: wrappers pass on what the terminal sent to all
        if self.received is not None:
            self._say("stopped at once", prefix="\x1b[?25h\n")
            for child in multiprocessing.active_children():  # loader workers, which signals do not reach
                child.kill()
            os._exit(130)
        self._first = now
        self.received = signal.Signals(number).name
        if self._is_told_elsewhere:
            pass
        elif self.phase == "training":
            self._say(f"{self.received}: saving after this step; once more to stop at once", prefix="\n")
        else:
            self._say(f"{self.received}: ending, because no step was taken yet", prefix="\n")
        if self.phase == "building":
            raise KeyboardInterrupt

    def _say(self, message: str, prefix: str) -> None:
        """Straight to the file descriptor: the interrupted code may hold the stream's lock."""
        if self.is_silent:
            return
        if self.as_json:
            record = {"time": time.time(), "event": "log", "level": "warning", "logger": "shoal", "message": message}
            text = to_json_line(record)
        else:
            # On a terminal: out of the bar's line, and with the cursor that the bar hides.
            text = (prefix if os.isatty(2) else "") + message
        with contextlib.suppress(OSError):  # a pipe whose reader got the signal first; the run goes on to save
            os.write(2, f"{text}\n".encode())
