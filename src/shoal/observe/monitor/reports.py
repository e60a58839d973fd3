"""What metrics.jsonl says of a run, line by line, in bounded memory."""

from collections import deque
from typing import Any

from shoal.observe.monitor.blocks import Blocks
from shoal.observe.monitor.curve import Curve
from shoal.observe.monitor.estimate import OCCASIONAL, Habit, Pace
from shoal.observe.monitor.values import is_count, number, numbers
from shoal.observe.phases import STEPPING

RECENT_S = 60.0
"""What counts as of late."""
_MOST_CURVES = 64
_STEPPING = frozenset(STEPPING)


class Reports:
    """What metrics.jsonl says. A resumed run begins a new file, so that all of it is made anew."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.recent: deque[Pace] = deque(maxlen=10_000)
        self.habits = {phase: Habit() for phase in OCCASIONAL}
        self.blocks = Blocks()
        self.rates: dict[str, list[float]] = {}
        """name -> [its sum over the seconds of steps, those seconds]."""
        self.rate_of: dict[str, deque[tuple[float, float, float]]] = {}
        """name -> [(time, rate, seconds of steps)] of late."""
        self.metrics: dict[str, float] = {}
        self.step = 0
        self.epoch: float | None = None
        self.time = 0.0
        """Of the last report."""
        self.report_s = 0.0
        """What it covers."""
        self._stepped_s = 0.0
        """Of steps since the last rate: an evaluation in between has a report of its own, without one."""

    def add(self, record: dict[str, Any], began: float) -> None:
        """A line; `began` stands in for the time of the first one where lines have none (old runs)."""
        step, metrics = record.get("step"), record.get("metrics")
        if not is_count(step) or not isinstance(metrics, dict):
            return
        seconds = numbers(record.get("seconds"))
        covered_s = sum(seconds.values())
        told = number(record.get("time"))
        self.time = told if told is not None else (self.time or began) + covered_s
        steps, self.step, self.report_s = max(step - self.step, 0), step, covered_s or self.report_s
        self.epoch = number(record.get("epoch")) if "epoch" in record else self.epoch
        self.recent.append(Pace(self.time, steps, seconds))
        while len(self.recent) > 6 and self.recent[0].time < self.time - RECENT_S:
            self.recent.popleft()
        for phase, habit in self.habits.items():
            if seconds.get(phase, 0.0) > 0:
                habit.seconds += seconds[phase]
                habit.last_step = step
        self.blocks.add(self.time, step, seconds)
        self._add_metrics(step, numbers(metrics), sum([s for phase, s in seconds.items() if phase in _STEPPING]))

    def _add_metrics(self, step: int, metrics: dict[str, float], stepping_s: float) -> None:
        self.metrics |= metrics
        self._stepped_s += stepping_s
        has_rate = False
        for name, value in metrics.items():
            curve = self.curves.get(name)
            if curve is None and len(self.curves) < _MOST_CURVES:
                curve = self.curves[name] = Curve()
            if curve is not None:
                curve.add(step, value)
            if name.endswith("_per_s"):
                if name not in self.rates:
                    self.rates[name], self.rate_of[name] = [0.0, 0.0], deque(maxlen=10_000)
                sums, late = self.rates[name], self.rate_of[name]
                sums[0] += value * self._stepped_s
                sums[1] += self._stepped_s
                late.append((self.time, value, self._stepped_s))
                has_rate = True
                while len(late) > 3 and late[0][0] < self.time - RECENT_S:
                    late.popleft()
        if has_rate:
            self._stepped_s = 0.0
