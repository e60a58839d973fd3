"""What is known of a run after some events, reports and steps, as far as its metrics need it."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from shoal.core.version import VERSION
from shoal.observe.phases import COMPUTING, STEPPING
from shoal.observe.prometheus.names import FAILURES
from shoal.observe.records import Report, Workers

_ENDS = ("done", "failed", "interrupted")
_USEFUL = (*COMPUTING, "comm")
_TOO_MUCH = 1e300


@dataclass(frozen=True)
class Past:
    """Worker-seconds of those who were there before, as a run's folder tells them."""

    useful_s: float = 0.0
    """In steps that count."""
    worker_s: float = 0.0
    """All of them."""
    asked: float | None = None
    """When the session was asked for that ended last."""
    until: float | None = None
    """When it ended."""


@dataclass
class RunState:
    """Takes what observers are told. Not for several threads: `Exposition` is."""

    run: str = ""
    info: dict[str, str] = field(default_factory=dict)
    is_active: bool = True
    started: float | None = None
    """When the present workers announced themselves."""
    asked: float | None = None
    """When their session was asked for."""
    begins: float | None = None
    """Since when they have been held for the run."""
    world_size: int = 0
    ticked: tuple[int, float] | None = None
    """The newest step and when it was done: one value, so that it can be set without a lock."""
    told: float | None = None
    """When something but a step was last done."""
    planned_steps: int | None = None
    global_batch: int = 0
    epochs: float | None = None
    start_step: int = 0
    steps_before: int = 0
    """Steps of earlier starts."""
    reported_step: int | None = None
    samples: int | None = None
    """As the last report counts them; None before the first of a start."""
    samples_total: float = 0.0
    tokens_total: float | None = None
    unbooked_s: float = 0.0
    """Seconds of steps since the last report that told a rate."""
    useful_s: float = 0.0
    """Of a worker, on average, since the start."""
    metrics: dict[str, float] = field(default_factory=dict)
    step_s: dict[str, float] = field(default_factory=dict)
    """phase -> seconds of a step."""
    by_phase: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """phase -> seconds of each worker so far."""
    workers: Workers | None = None
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURES, 0))
    is_failure_told: bool = False
    restarts: int = 0
    saved: int = 0
    save_failures: int = 0
    stall_s: float = 0.0
    newest: dict[str, float] = field(default_factory=dict)
    """metric -> value, of the newest checkpoint."""
    past: Past = field(default_factory=Past)
    is_all_past: bool = False
    """Whether the present workers are among the past. Not told by times: machines' clocks may differ by minutes."""

    def copy(self) -> "RunState":
        """As it is now; cheap, however many workers there are, because their values are never changed in place."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(other, name, dict(value))
        return other

    def remember(self, before: "RunState", past: Past) -> None:
        """What a run's folder tells of earlier starts, before others begin."""
        self.past, self.is_all_past = past, True  # until others start
        self.restarts = max(self.restarts, before.restarts)
        self.saved = max(self.saved, before.saved)
        self.save_failures = max(self.save_failures, before.save_failures)
        self.stall_s = max(self.stall_s, before.stall_s)
        self.newest = before.newest | self.newest
        for kind, count in before.failures.items():
            self.failures[kind] = max(self.failures[kind], count)

    def tick(self, step: int, now: float) -> None:
        """A step is done."""
        self.ticked = (step, now)

    def report(self, report: Report) -> None:
        """New metrics."""
        self.told, self.epochs = report.time, report.epoch
        seconds = {phase: value for phase, value in report.seconds.items() if is_number(value)}
        self.useful_s += sum(seconds.get(phase, 0.0) for phase in _USEFUL)
        self.unbooked_s += sum(seconds.get(phase, 0.0) for phase in STEPPING)
        if (steps := report.step - (self.reported_step or self.start_step)) > 0:
            self.step_s = {phase: seconds[phase] / steps for phase in STEPPING if phase in seconds}
            fresh = self.global_batch * steps if self.samples is None else report.samples - self.samples
            self.samples_total += max(fresh, 0)
            self.samples, self.reported_step = report.samples, report.step
        for name, value in report.metrics.items():
            self.metrics[name] = float(value) if is_number(value) else math.nan
        if is_number(rate := report.metrics.get("tokens_per_s")):
            self.tokens_total = (self.tokens_total or 0.0) + rate * self.unbooked_s
        if "samples_per_s" in report.metrics:
            self.unbooked_s = 0.0
        if self.ticked is None or report.step > self.ticked[0]:
            self.ticked = (report.step, report.time)
        if report.workers is not None:
            self.take_workers(report.workers)

    def take_workers(self, workers: Workers) -> None:
        """A line on every worker."""
        self.workers = workers
        for phase, values in workers.seconds.items():
            self.by_phase[phase] = added(self.by_phase.get(phase, ()), values)

    def event(self, name: str, fields: Mapping[str, Any], now: float) -> None:
        """Something happened."""
        if name == "start":
            self._start(fields, now)
        elif name == "save":
            self._save(fields, now)
            self.told = now
        elif name == "save_failed":
            self.save_failures += 1
        elif name == "restart":
            self.restarts, self.is_failure_told = self.restarts + 1, False
        elif name in ("failure", "failed"):
            self._fail(fields)
        if name in _ENDS:
            self.is_active, self.told = False, now

    def _start(self, fields: Mapping[str, Any], now: float) -> None:
        self.run = self.run or str(fields.get("run", ""))
        self.world_size = _count(fields.get("world_size")) or 1
        self.steps_before, self.start_step = self.steps_total, _count(fields.get("step")) or 0
        self.ticked = self.samples = self.reported_step = self.told = self.workers = None
        self.unbooked_s = self.useful_s = 0.0
        self.planned_steps = _count(fields.get("num_steps"))
        self.global_batch = _count(fields.get("global_batch")) or 0
        self.is_active, self.is_failure_told, self.is_all_past, self.started = True, False, False, now
        self.asked = float(fields["asked"]) if is_number(fields.get("asked")) else None
        # Held since they were asked for, or since those before them ended, if it was for the same session.
        held_since = self.past.until if self.asked == self.past.asked and self.past.until is not None else self.asked
        self.begins = min(now if held_since is None else held_since, now)
        self.by_phase = {phase: values[: self.world_size] for phase, values in self.by_phase.items()}
        words = {name: str(fields.get(name, "")) for name in ("strategy", "device")}
        self.info = words | {"world_size": str(self.world_size), "version": VERSION}

    def _save(self, fields: Mapping[str, Any], now: float) -> None:
        # The newest one may have been saved by a machine whose clock is ahead of this one's.
        earlier = (self.newest.get("shoal_checkpoint_last_timestamp_seconds", 0.0), self.started or 0.0)
        before = max((when for when in earlier if when <= now), default=0.0)
        found = {
            "shoal_checkpoint_last_timestamp_seconds": now,
            "shoal_checkpoint_last_step": fields.get("step"),
            "shoal_checkpoint_last_duration_seconds": fields.get("seconds"),
            "shoal_checkpoint_last_stall_seconds": fields.get("stall_s"),
            "shoal_checkpoint_last_size_bytes": fields.get("bytes"),
            "shoal_checkpoint_interval_seconds": now - before if before else None,
        }
        self.newest |= {name: float(value) for name, value in found.items() if is_number(value)}
        self.saved += 1
        self.stall_s += fields["stall_s"] if is_number(fields.get("stall_s")) else 0.0

    def _fail(self, fields: Mapping[str, Any]) -> None:
        """Once for each failure: a worker tells its own, and the launcher tells it too."""
        if not self.is_failure_told:
            self.is_failure_told = True
            is_memory = str(fields.get("message", "")).startswith("out of memory")
            kind = "out_of_memory" if is_memory else fields.get("kind")
            self.failures[kind if kind in FAILURES else "exception"] += 1

    @property
    def step(self) -> int:
        """Where the run is."""
        return self.start_step if self.ticked is None else self.ticked[0]

    @property
    def steps_total(self) -> int:
        """Steps made, lost ones included."""
        return self.steps_before + max(self.step - self.start_step, 0)

    def goodput_at(self, now: float) -> float | None:
        """Share of the workers' time that went into steps which count, as far as reports tell of them."""
        held_s, useful_s = self.past.worker_s, self.past.useful_s
        if self.begins is not None and not self.is_all_past:
            until = now if self.is_active else self.told or now
            held_s += self.world_size * max(until - self.begins, 0.0)
            useful_s += self.world_size * self.useful_s
        return min(useful_s / held_s, 1.0) if held_s > 0 else None


def added(before: tuple[float, ...], more: Sequence[float | None]) -> tuple[float, ...]:
    """Rank by rank; one that is not there counts as 0."""
    size = max(len(before), len(more))
    fresh = [float(value) if value is not None and is_number(value) else 0.0 for value in more]
    padded = [*before, *[0.0] * (size - len(before))], [*fresh, *[0.0] * (size - len(fresh))]
    return tuple(a + b for a, b in zip(*padded, strict=True))


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it can be reckoned with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _TOO_MUCH


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
