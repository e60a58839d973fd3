"""Trials as their search knows them: values, and what events make of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.core.errors import UserError
from shoal.core.metrics import direction
from shoal.tune.space import Config

Status = Literal["waiting", "running", "paused", "done", "stopped", "failed"]
ENDED: frozenset[str] = frozenset({"done", "stopped", "failed"})
DIVERGED = "diverged"
END_METRICS = {"samples_per_s": "max", "tokens_per_s": "max", "goodput": "max", "time_to_first_step_s": "min"}
"""What can be searched for that a run knows when it ends, and which way it is better."""
SAME = 1e-5
"""Progress that differs by less is the same: reports round it."""


@dataclass(frozen=True)
class Objective:
    """What a search goes by."""

    metric: str
    is_less_better: bool

    @property
    def is_of_end(self) -> bool:
        """Whether the summary of a run tells it, and not its evaluations."""
        return self.metric in END_METRICS

    def loss(self, value: float | None) -> float:
        """The value as something of which less is better; what is no number is worst of all."""
        if value is None or not math.isfinite(value):
            return math.inf
        return value if self.is_less_better else -value

    def to_text(self) -> str:
        """`val_accuracy:max`"""
        return f"{self.metric}:{'min' if self.is_less_better else 'max'}"

    @classmethod
    def from_text(cls, text: str) -> "Objective | None":
        """What `NAME`, `NAME:min` or `NAME:max` means; None where the name alone does not tell."""
        name, _, mode = text.partition(":")
        mode = mode or direction(name) or END_METRICS.get(name, "")
        return cls(name, mode == "min") if mode else None


@dataclass(frozen=True)
class Result:
    """An evaluation of a trial."""

    step: int
    progress: float
    """Epochs, or steps where the recipe counts those."""
    metrics: Mapping[str, float]


@dataclass
class Trial:
    """One run of a search."""

    number: int
    config: Config
    status: Status = "waiting"
    results: list[Result] = field(default_factory=list)
    """Of the weights that it has now: where it took over those of another, their history is that of the other."""
    reason: str = ""
    """Why it was stopped or has failed."""
    kind: str = ""
    """How it has failed: `diverged`, `refused`, `exception`, `run`, ..."""
    generation: int = 0
    """How often it has taken over the weights of another."""
    lineage: list[dict[str, Any]] = field(default_factory=list)
    """From where, with which settings, at what progress."""
    past: list[tuple[Config, float, list[Result]]] = field(default_factory=list)
    """Settings that it had before, since when, and the results until it took over others."""
    stop: str | None = None
    """Why it is to end now: decided with its last result."""
    traceback: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    starts: int = 0
    """How often it was given a place."""
    first_step_s: list[float] = field(default_factory=list)
    """Seconds from each of these to its first step."""
    busy_s: float = 0.0
    """Seconds in which it had a place."""
    made: float = 0.0
    """Epochs, or steps, that it has trained itself, whatever became of them."""
    until: float | None = None
    """Where it is to pause; it keeps to that until it is told to go on, however often its place is lost on the way."""
    began_at: float = 0.0
    """Its progress when it was last given a place."""

    @property
    def name(self) -> str:
        """Of its run's folder."""
        return f"{self.number:04d}" + (f"-{self.generation}" if self.generation else "")

    @property
    def is_ended(self) -> bool:
        """Whether nothing of it is left to do."""
        return self.status in ENDED

    @property
    def progress(self) -> float:
        """At its last evaluation."""
        return self.results[-1].progress if self.results else 0.0

    @property
    def since(self) -> float:
        """Progress from which on it has its present settings."""
        return float(self.lineage[-1]["progress"]) if self.lineage else 0.0

    @property
    def own_results(self) -> list[Result]:
        """Those that its present settings have made: what it took over is another's."""
        return (
            [result for result in self.results if result.progress > self.since + SAME] if self.lineage else self.results
        )

    def lives(self) -> list["Trial"]:
        """The trial with each of the settings that it has had, each with its own folder and results."""
        before = [
            Trial(
                self.number,
                config,
                "stopped",
                [r for r in results if not since or r.progress > since + SAME],
                generation=place,
            )
            for place, (config, since, results) in enumerate(self.past)
        ]
        return [*before, self]

    def at(self, progress: float) -> Result | None:
        """Its first evaluation from there on."""
        return next((result for result in self.results if result.progress >= progress - SAME), None)

    def loss_at(self, progress: float, objective: Objective) -> float:
        """How good it was there, as something of which less is better; infinite if it never came so far."""
        found = self.at(progress)
        return math.inf if found is None else objective.loss(found.metrics.get(objective.metric))

    def best(self, objective: Objective) -> Result | None:
        """Its best evaluation."""
        rated = [r for r in self.own_results if math.isfinite(objective.loss(r.metrics.get(objective.metric)))]
        return min(rated, key=lambda result: objective.loss(result.metrics[objective.metric]), default=None)

    def value(self, objective: Objective) -> float | None:
        """At its best evaluation, or as its summary has it; None where there is none."""
        return self.values([objective])[0]

    def values(self, objectives: Sequence[Objective]) -> list[float | None]:
        """Of all objectives at the evaluation that is best by the first: of one and the same state of the weights."""
        evaluated = [objective for objective in objectives if not objective.is_of_end]
        best = self.best(evaluated[0]) if evaluated else None
        metrics: Mapping[str, Any] = (best or (self.own_results or [Result(0, 0.0, {})])[-1]).metrics
        found = [(self.summary if o.is_of_end else metrics).get(o.metric) for o in objectives]
        return [float(value) if isinstance(value, int | float) and math.isfinite(value) else None for value in found]

    def last_value(self, objective: Objective) -> float | None:
        """Of its last evaluation that has one."""
        known = [result.metrics.get(objective.metric) for result in self.results]
        return next((value for value in reversed(known) if value is not None and math.isfinite(value)), None)


def fold(events: Iterable[Mapping[str, Any]]) -> dict[int, Trial]:
    """The trials that a search's events tell of."""
    trials: dict[int, Trial] = {}
    for number, event in enumerate(events, 1):
        try:
            apply(trials, event)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"journal.jsonl: line {number} does not follow from those before it ({error!r}); bring the "
                "file back from a copy, or start a new search"
            ) from error
    return trials


def apply(trials: dict[int, Trial], event: Mapping[str, Any]) -> None:
    """What one event changes. The only place where trials change."""
    what = event["event"]
    if what == "trial":
        trials[event["trial"]] = Trial(event["trial"], dict(event["config"]))
    elif what == "moves":
        for move in event["moves"]:
            _apply_move(trials, move)
    elif what == "retry":
        for number in event["trials"]:
            trials[number].status, trials[number].reason, trials[number].kind = "waiting", "", ""
    elif what == "start":  # of the search: what ran when it was killed runs no longer
        for trial in trials.values():
            if trial.status == "running":
                trial.status = "waiting"
                trial.made += max(0.0, trial.progress - trial.began_at)
    elif "trial" in event:
        _apply_to(trials[event["trial"]], what, event)


def _apply_move(trials: dict[int, Trial], move: Mapping[str, Any]) -> None:
    trial = trials[move["trial"]]
    trial.until = None
    if move["move"] == "go":
        trial.status = "waiting"
    elif move["move"] == "stop":
        trial.status, trial.reason = "stopped", move["reason"]
    else:
        trial.past.append((trial.config, trial.since, trial.results))
        trial.generation += 1
        trial.config = dict(move["config"])
        trial.results = list(trials[move["from"]].results)
        trial.status, trial.reason, trial.kind, trial.stop = "waiting", "", "", None
        trial.lineage.append({key: move[key] for key in ("from", "progress", "config")})


def _apply_to(trial: Trial, what: str, event: Mapping[str, Any]) -> None:
    if what == "run":
        trial.status = "running"
        trial.starts += 1
        trial.until = event["until"]
        trial.began_at = trial.progress
    elif what == "first_step":
        trial.first_step_s.append(event["seconds"])
    elif what == "result":
        if not trial.results or event["step"] > trial.results[-1].step:
            trial.results.append(Result(event["step"], event["progress"], event["metrics"]))
            trial.stop = event.get("stop")
    elif what == "left":  # its place, to go on later: nothing of it is lost
        trial.status = "waiting"
    elif what == "paused":
        trial.status = "paused"
    elif what == "ended":
        trial.status = event["status"]
        trial.reason = event.get("reason", "")
        trial.kind = event.get("kind", "")
        trial.traceback = event.get("traceback", "")
        trial.summary = dict(event.get("summary", {}))
    if "busy_s" in event:
        trial.busy_s += event["busy_s"]
        trial.made += event["made"]
