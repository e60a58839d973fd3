"""What the workers of a run tell each other when they report: numbers to add up, and how each of them fares."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core.group import Group
from shoal.observe import system
from shoal.observe.clock import Clock
from shoal.observe.phases import PHASES
from shoal.observe.records import Workers
from shoal.observe.system import SystemWatch
from shoal.observe.verdict import Circumstances, Verdict, judge

_AS_OFTEN_AS = 64
"""With so many workers and fewer, lines of workers.jsonl are written as often as the recipe says."""


@dataclass(frozen=True)
class Told:
    """What came of one exchange; the same on every worker."""

    own: list[list[float]]
    """What each worker gave, by rank."""
    seconds: dict[str, float]
    """Seconds by phase since the last exchange, the mean over the workers."""
    workers: Workers | None
    """Every worker by itself, where it is time for that; on rank 0 alone."""

    def sums(self) -> list[float]:
        """What the workers gave, added up."""
        return [sum(values) for values in zip(*self.own, strict=True)]


@dataclass
class Vitals:
    """Gathers by one message. Every worker must call the same methods at the same steps."""

    group: Group
    clock: Clock
    around: Circumstances = field(default_factory=Circumstances)
    system: SystemWatch | None = None
    """None: how much of its machine a worker uses is of no interest."""
    workers_every_s: float = 10.0
    ahead_s: float = 0.0
    """For how long this host has waited for its GPU since the last exchange."""
    totals: list[dict[str, float]] = field(default_factory=list)
    """Seconds by phase of each worker since this start, as far as was told."""
    total_ahead_s: float = 0.0
    """Of rank 0's host and those of the others, the mean."""
    _since_line: list[dict[str, float]] = field(default_factory=list)
    _ahead_since_line_s: float = 0.0
    _line_at: float = field(default_factory=time.monotonic)
    _asked_at: float = -math.inf
    _uses: list[float] = field(default_factory=lambda: [math.nan] * len(system.NAMES))

    def exchange(self, *own: float) -> Told:
        """Tell the others these numbers, and how this worker fares."""
        seconds = self.clock.since_report()
        numbers = [*own, self.ahead_s, *(seconds.get(phase, 0.0) for phase in PHASES)]
        self.ahead_s = 0.0
        if self.system is not None:
            numbers += self._ask_system()
        everybody = self.group.gather_numbers(numbers)
        first, phases = len(own), len(own) + 1
        given = [numbers[:first] for numbers in everybody]
        by_rank = [dict(zip(PHASES, numbers[phases : phases + len(PHASES)], strict=True)) for numbers in everybody]
        ahead_s = math.fsum(numbers[first] for numbers in everybody) / len(everybody)
        self.total_ahead_s += ahead_s
        self._ahead_since_line_s += ahead_s
        self.totals = _added(self.totals, by_rank)
        self._since_line = _added(self._since_line, by_rank)
        return Told(given, _mean(by_rank), self._line([numbers[phases + len(PHASES) :] for numbers in everybody]))

    def _ask_system(self) -> list[float]:
        """Not at every report: between two, a worker uses what it used."""
        assert self.system is not None
        now = time.monotonic()
        if now - self._asked_at >= self._every_s:
            self._asked_at = now
            found = self.system.ask()
            self._uses = [found.get(name, math.nan) for name in system.NAMES]
        return self._uses

    @property
    def _every_s(self) -> float:
        return self.workers_every_s * max(1.0, self.group.world_size / _AS_OFTEN_AS)

    def _line(self, uses: list[list[float]]) -> Workers | None:
        passed_s = time.monotonic() - self._line_at
        if self.system is None or self.group.rank != 0 or passed_s < self._every_s:
            return None
        since, self._since_line, self._line_at = self._since_line, [], time.monotonic()
        ahead_s, self._ahead_since_line_s = self._ahead_since_line_s, 0.0
        verdict = judge(since, self.around, ahead_s if self.around.is_gpu else None)
        named = {phase: [round(seconds[phase], 5) for seconds in since] for phase in PHASES}
        used = {name: [_known(values[number]) for values in uses] for number, name in enumerate(system.NAMES)}
        return Workers(
            over_s=round(passed_s, 3),
            seconds={phase: seconds for phase, seconds in named.items() if any(seconds)},
            system={name: values for name, values in used.items() if any(value is not None for value in values)},
            bottleneck=verdict.bottleneck,
            verdict=str(verdict),
        )

    def verdict(self) -> Verdict:
        """On all the time since this start, as far as was told."""
        return judge(self.totals, self.around, self.total_ahead_s if self.around.is_gpu else None)


def _added(before: list[dict[str, float]], new: list[dict[str, float]]) -> list[dict[str, float]]:
    if not before:
        return [dict(seconds) for seconds in new]
    return [
        {phase: mine[phase] + seconds for phase, seconds in now.items()} for mine, now in zip(before, new, strict=True)
    ]


def _mean(by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of phases that took time."""
    means = {phase: math.fsum(seconds[phase] for seconds in by_rank) / len(by_rank) for phase in PHASES}
    return {phase: round(seconds, 6) for phase, seconds in means.items() if seconds > 0}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.5g}")
