"""What the workers of a run tell each other when they report: numbers to add up, and how each of them fares."""

import math
import time
from dataclasses import dataclass, field

import torch

from shoal.core.group import Group
from shoal.observe import system
from shoal.observe.clock import Clock
from shoal.observe.compiling import Recompiled
from shoal.observe.phases import PHASES
from shoal.observe.records import Workers
from shoal.observe.system import SystemWatch
from shoal.observe.verdict import Circumstances, Verdict, judge

_AS_OFTEN_AS = 64
"""With so many workers and fewer, lines of workers.jsonl are written as often as the recipe says."""


_MUCH_MORE = 1.5
"""Workers that compile the same take times that differ by less."""


@dataclass(frozen=True)
class Told:
    """What came of one exchange; the same on every worker."""

    own: torch.Tensor
    """What each worker gave, a row a rank."""
    seconds: dict[str, float]
    """Seconds by phase since the last exchange, the mean over the workers."""
    workers: Workers | None
    """Every worker by itself, where it is time for that; on rank 0 alone."""

    def sums(self) -> list[float]:
        """What the workers gave, added up."""
        return [float(total) for total in self.own.sum(0).tolist()]


@dataclass
class _Spent:
    """What the workers spent over some time."""

    seconds: torch.Tensor | None = None
    """A row a rank, a column a phase."""
    ahead_s: float = 0.0
    """For how long hosts waited for their GPUs: the mean over the workers."""
    recompiled: Recompiled = field(default_factory=Recompiled)
    """By this worker."""
    others: torch.Tensor | None = None
    """How often each worker did, and for how many seconds, as far as was told; a row a rank."""

    def add(self, seconds: torch.Tensor, ahead_s: float, recompiled: torch.Tensor) -> None:
        self.seconds = seconds.clone() if self.seconds is None else self.seconds + seconds
        self.others = recompiled.clone() if self.others is None else self.others + recompiled
        self.ahead_s += ahead_s

    def verdict(self, around: Circumstances) -> Verdict:
        rows = [] if self.seconds is None else self.seconds.tolist()
        workers = [dict(zip(PHASES, row, strict=True)) for row in rows]
        return judge(workers, around, self.ahead_s if around.is_gpu else None, self._worst())

    def _worst(self) -> Recompiled:
        """Of the worker that compiled again for longest: this one, whose reasons are known, unless another did more."""
        rows = [] if self.others is None else self.others.tolist()
        rank, (count, seconds) = max(enumerate(rows), key=lambda row: row[1][1], default=(0, (0.0, 0.0)))
        if seconds <= max(self.recompiled.seconds, 1e-3) * _MUCH_MORE:
            return self.recompiled
        return Recompiled(int(count), seconds, rank=rank, given_up=self.recompiled.given_up)


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
    _in_all: _Spent = field(default_factory=_Spent)
    """Since this start, as far as was told."""
    _since_line: _Spent = field(default_factory=_Spent)
    _untold: Recompiled = field(default_factory=Recompiled)
    """What this worker has compiled again since the last exchange."""
    _line_at: float = field(default_factory=time.monotonic)
    _has_line: bool = False
    _everybody_uses: torch.Tensor | None = None
    """As of the last exchange, a row a rank."""
    _asked_at: float = -math.inf
    _uses: list[float] = field(default_factory=lambda: [math.nan] * len(system.NAMES))

    def exchange(self, *own: float) -> Told:
        """Tell the others these numbers, and how this worker fares."""
        seconds = self.clock.since_report()
        again, self._untold = self._untold, Recompiled()
        numbers = [*own, self.ahead_s, *(seconds.get(phase, 0.0) for phase in PHASES), again.count, again.seconds]
        self.ahead_s = 0.0
        if self.system is not None:
            numbers += self._ask_system()
        everybody = self.group.gather_numbers(numbers)
        first = len(own) + 1
        last = first + len(PHASES)
        spent, recompiled, uses = everybody[:, first:last], everybody[:, last : last + 2], everybody[:, last + 2 :]
        means = everybody[:, len(own) : last].mean(0).tolist()
        for total in (self._in_all, self._since_line):
            total.add(spent, means[0], recompiled)
        self._everybody_uses = uses
        means[1] = float(spent[0, 0])  # getting ready ends for all at once, and is told from when rank 0's clock began
        mean_s = {phase: round(value, 6) for phase, value in zip(PHASES, means[1:], strict=True) if value > 0}
        is_due = time.monotonic() - self._line_at >= self._every_s
        return Told(everybody[:, : len(own)], mean_s, self._line() if is_due else None)

    def note_recompiled(self, again: Recompiled) -> None:
        """This worker has compiled again what was compiled; the others hear how much of it at the next exchange."""
        self._untold = self._untold.and_then(again)
        for total in (self._in_all, self._since_line):
            total.recompiled = total.recompiled.and_then(again)

    def _ask_system(self) -> list[float]:
        """Not at every report: between two, a worker uses what it used."""
        assert self.system is not None
        now = time.monotonic()
        if now - self._asked_at >= self._every_s:
            self._asked_at = now
            try:
                found = self.system.ask()
            except Exception:  # noqa: BLE001 - no file left to open, a sandbox of its own kind: it is not known then
                found = {}
            self._uses = [found.get(name, math.nan) for name in system.NAMES]
        return self._uses

    @property
    def _every_s(self) -> float:
        return self.workers_every_s * max(1.0, self.group.world_size / _AS_OFTEN_AS)

    def last_line(self) -> Workers | None:
        """At the end of a start that was too short for one, as far as was told; asks nobody. None where there was one:
        what comes last, a save and an evaluation, is not what most of the time went to."""
        return None if self._has_line else self._line(is_last=True)

    def _line(self, *, is_last: bool = False) -> Workers | None:
        since, uses = self._since_line, self._everybody_uses
        if self.system is None or self.group.rank != 0 or since.seconds is None or uses is None:
            return None
        now = time.monotonic()
        passed_s = float(since.seconds[0].sum()) if is_last else now - self._line_at
        self._since_line, self._line_at = _Spent(), now
        self._has_line = True
        by_phase = dict(zip(PHASES, since.seconds.T.tolist(), strict=True))
        by_name = {
            name: [_known(value) for value in column]
            for name, column in zip(system.NAMES, uses.T.tolist(), strict=True)
        }
        verdict = since.verdict(self.around)
        return Workers(
            over_s=round(passed_s, 3),
            seconds={phase: [round(value, 5) for value in values] for phase, values in by_phase.items() if any(values)},
            system={name: values for name, values in by_name.items() if any(value is not None for value in values)},
            bottleneck=verdict.bottleneck,
            verdict=str(verdict),
        )

    def verdict(self) -> Verdict:
        """On all the time since this start, as far as was told."""
        return self._in_all.verdict(self.around)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.5g}")
