"""Where the seconds of a run went, phase by phase, at the cost of one clock reading a phase."""

import time


class Clock:
    """Splits time into phases: each `lap` books everything since the last one to a phase."""

    def __init__(self) -> None:
        self.total_s: dict[str, float] = {}
        self._reported_s: dict[str, float] = {}
        self.started = self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.total_s[phase] = self.total_s.get(phase, 0.0) + now - self._last
        self._last = now

    def since_report(self) -> dict[str, float]:
        """Seconds by phase since this was last called."""
        fresh = {phase: total - self._reported_s.get(phase, 0.0) for phase, total in self.total_s.items()}
        self._reported_s = dict(self.total_s)
        return {phase: seconds for phase, seconds in fresh.items() if seconds > 0}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self.started
