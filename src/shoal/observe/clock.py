"""Where the seconds of a worker went, phase by phase: one clock reading a phase, and on a GPU one event of its own."""

import time
from collections import deque
from typing import Any, Protocol

from shoal.observe.phases import STEPPING

_MOST_PENDING = 1000
"""Points that wait to be taken in, where reports are far apart."""


class Marks(Protocol):
    """Points in the time of a device, which are reached later than the host passes by."""

    def mark(self) -> Any:
        """The point that the device comes to when it has done all it was told so far."""
        ...

    def is_reached(self, mark: Any) -> bool:
        """Whether it has come there; this does not wait."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Between two points that were reached."""
        ...

    def let_go(self, mark: Any) -> None:
        """It is not asked for any more."""
        ...

    def wait(self) -> None:
        """Until the device has done all it was told."""
        ...


class Clock:
    """Splits time into phases: each `lap` books everything since the last one to a phase.

    On the host every second is booked, whatever happens. With a device, the phases are those of the device: it computes
    long after the host has told it to, and while it computes, what the host does costs nothing. `host_s` is then what
    the host itself spent, which tells whether it can keep up.
    """

    def __init__(self, marks: Marks | None = None, is_split: bool = True) -> None:
        """`is_split`: False books what a step computes as `forward_backward` and `optimizer` alone."""
        self.host_s: dict[str, float] = {}
        """Seconds of the host by phase."""
        self.total_s: dict[str, float] = self.host_s if marks is None else {}
        """Seconds by phase: of the device where there is one."""
        self.is_split = is_split
        self.reported_s: dict[str, float] = {}
        """Of `total_s`, what `since_report` has told."""
        self._before_s = 0.0
        """Of the present lap, what was before a wait for others."""
        self._waited_s = 0.0
        """Of the present lap, what was waiting for others."""
        self._compiled_s = 0.0
        """Of the present lap, what was compiling."""
        self._marks = marks
        self._pending: deque[tuple[Any, str]] = deque()
        """Points that the device has not come to as far as is known, each with what lies before it."""
        self._open: list[tuple[Any, str | None]] = []
        """Of the present lap: points, each with what lies before it if that is `comm` or `compile`."""
        self._last_mark = marks.mark() if marks is not None else None
        self.started_at = time.time()
        """In unix seconds."""
        self.started = self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap to `phase`, but for what was spent compiling, or waiting for others in a
        step."""
        if phase == "backward" and not self.is_split:
            phase = "forward_backward"
        now = time.perf_counter()
        own_s, waited_s = self._before_s + now - self._last, self._waited_s
        self._last, self._before_s, self._waited_s = now, 0.0, 0.0
        if waited_s:
            if phase in STEPPING:
                self.host_s["comm"] = self.host_s.get("comm", 0.0) + waited_s
            else:
                own_s += waited_s
        if self._compiled_s:
            self.host_s["compile"] = self.host_s.get("compile", 0.0) + self._compiled_s
            self._compiled_s = 0.0
        self.host_s[phase] = self.host_s.get(phase, 0.0) + own_s
        if self._marks is not None:
            for mark, apart in self._open:
                is_apart = apart == "compile" or (apart == "comm" and phase in STEPPING)
                self._pending.append((mark, apart if apart is not None and is_apart else phase))
            self._open.clear()
            self._pending.append((self._marks.mark(), phase))
            if len(self._pending) > _MOST_PENDING:
                self.settle()

    def lap_within(self, phase: str) -> None:
        """A lap inside of what a strategy does, where anybody wants to know."""
        if self.is_split:
            self.lap(phase)

    def begin_wait(self) -> None:
        """From here on, others are waited for."""
        self._before_s += self._cut(None)

    def end_wait(self) -> None:
        """Up to here, others were waited for."""
        self._waited_s += self._cut("comm")

    def begin_compile(self) -> None:
        """From here on, torch.compile is at work."""
        self._before_s += self._cut(None)

    def end_compile(self) -> None:
        """Up to here, it was."""
        self._compiled_s += self._cut("compile")

    def _cut(self, apart: str | None) -> float:
        """Seconds since the last point, within a lap."""
        now = time.perf_counter()
        passed_s, self._last = now - self._last, now
        if self._marks is not None:
            self._open.append((self._marks.mark(), apart))
        return passed_s

    def settle(self) -> None:
        """Take in what the device has done since; nothing is waited for."""
        marks = self._marks
        while marks is not None and self._pending and marks.is_reached(self._pending[0][0]):
            mark, phase = self._pending.popleft()
            self.total_s[phase] = self.total_s.get(phase, 0.0) + max(marks.seconds(self._last_mark, mark), 0.0)
            marks.let_go(self._last_mark)
            self._last_mark = mark

    def finish(self) -> None:
        """Wait for the device, and take in all; of one that has failed, what is known."""
        if self._marks is None:
            return
        try:
            self._marks.wait()
            self.settle()
        except RuntimeError:  # after some errors a GPU answers nothing else; the error itself is on its way to the user
            self._marks = None
            self._pending.clear()

    def since_report(self) -> dict[str, float]:
        """Seconds by phase since this was last called."""
        self.settle()
        fresh = {phase: total - self.reported_s.get(phase, 0.0) for phase, total in self.total_s.items()}
        self.reported_s = dict(self.total_s)
        return {phase: seconds for phase, seconds in fresh.items() if seconds > 0}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self.started
