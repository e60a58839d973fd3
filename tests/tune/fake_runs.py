"""Runs that take no time, for `Search` as it is: they train by hashing, save, evaluate, fail and are killed by chance.

What they come to depends on their settings and steps alone, as it does for real ones.
"""

import hashlib
import json
import math
import queue
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.core.errors import RunError
from shoal.core.storage import to_json_line
from shoal.tune import search as search_module
from shoal.tune.adopt import DamagedError
from shoal.tune.journal import Journal
from shoal.tune.search import Search
from shoal.tune.segment import Message
from shoal.tune.setup import Setup
from shoal.tune.trial import Trial, fold

SAVE_EVERY = 3


class KilledError(BaseException):
    """The process that searches is gone."""


@dataclass
class Chance:
    """What happens, and how likely."""

    seed: int = 0
    tuner_killed: float = 0.0
    """Before, or after, a line of the journal is written."""
    worker_killed: float = 0.0
    place_lost: float = 0.0
    report_lost: float = 0.0
    """When its worker is killed before it was heard."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def is_so(self, likely: float) -> bool:
        return self.random.random() < likely


@dataclass
class Run:
    """What the folder of a run holds."""

    config: Mapping[str, Any]
    checkpoints: dict[int, tuple[str, dict[str, float], int]] = field(default_factory=dict)
    """step -> weights, metrics, the step that these are of"""
    reports: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None


class MadeJournal(Journal):
    """In memory; the process may be killed at any line."""

    def __init__(self, lines: list[str], chance: Chance) -> None:
        self.lines, self._chance = lines, chance
        self.has_room: Callable[[str, dict[str, Any]], bool] = lambda event, fields: True
        self._is_broken = False

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        if self._chance.is_so(self._chance.tuner_killed / 2):
            raise KilledError
        self._is_broken = self._is_broken or not self.has_room(event, fields)
        if self._is_broken:
            raise RunError("no room")
        self.lines.append(to_json_line({"time": 0.0, "event": event, **fields}))
        if self._chance.is_so(self._chance.tuner_killed / 2):
            raise KilledError
        found: dict[str, Any] = json.loads(self.lines[-1])
        return found


class World:
    """The disk, which outlives whoever searches; and the places of one who does."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        setup: Setup,
        places: int = 3,
        steps_per_epoch: int = 6,
        fails: Callable[[Mapping[str, Any], int], str | None] = lambda config, step: None,
    ) -> None:
        self.setup, self.places, self.steps_per_epoch, self.fails = setup, places, steps_per_epoch, fails
        self.runs: dict[str, Run] = {}
        self.lines: list[str] = []
        self.adopted: list[tuple[str, int, str]] = []
        """Donor, step, heir."""
        self.chance = Chance()
        self.segments: list[FakeSegment] = []
        self.num_busy = 0
        monkeypatch.setattr(search_module, "Segment", self._segment)
        monkeypatch.setattr(search_module, "prepared_run", self._prepare)
        monkeypatch.setattr(search_module, "adopt", self._adopt)
        monkeypatch.setattr(search_module, "read_metrics", self._reports)
        monkeypatch.setattr(search_module, "prune", lambda *arguments: None)

    def search(self, chance: Chance, **options: Any) -> tuple[Search, int]:
        """Search to the end, going on as often as the tuner is killed; and how often it was."""
        self.chance, kills = chance, 0
        while True:
            search = self.make(**options)
            try:
                search.run()
            except KilledError:
                kills += 1
            else:
                return search, kills

    def make(self, **options: Any) -> Search:
        """One process that searches."""
        self.segments, self.num_busy = [], 0
        journal = options.pop("journal", None) or MadeJournal(self.lines, self.chance)
        folder: Any = SimpleNamespace(path=Path("s"), run_dir=lambda trial: Path("s") / "trials" / trial.name)
        view: Any = SimpleNamespace(show=lambda search: None, event=lambda event: None, note=lambda words: None)
        places: Any = self
        search = Search(self.setup, folder, journal, places, 1, view, lambda: None, **options)
        search._messages = self  # type: ignore[assignment]
        search._end_all = lambda: None  # type: ignore[method-assign] # who is killed ends nothing
        return search

    def came_of(self) -> dict[int, Any]:
        """All that must not depend on what happened on the way."""
        found = {}
        for number, trial in fold(map(json.loads, self.lines)).items():
            run = self.runs.get(trial.name)
            weights = run.checkpoints[max(run.checkpoints)][0] if run and trial.status == "done" else None
            results = [(result.step, dict(result.metrics)) for result in trial.results]
            found[number] = (trial.status, trial.reason, trial.config, str(results), trial.lineage, weights)
        return found

    # As `Slots`

    def take(self, wanted: int) -> Any:
        if self.num_busy == self.places:
            return None
        self.num_busy += 1
        return SimpleNamespace()

    def give_back(self, slot: Any, is_whole: bool = True) -> None:
        self.num_busy -= 1

    def trim(self) -> None:
        """Nothing."""

    def obstacle(self) -> None:
        """Nothing."""

    # As the queue of messages: whoever is chosen tells what it has to tell, or trains on

    def get(self, timeout: float) -> Message:
        while lively := [segment for segment in self.segments if segment.inbox or not segment.is_over]:
            segment = self.chance.random.choice(lively)
            if segment.inbox and (segment.is_over or self.chance.is_so(0.5)):
                return segment.inbox.pop(0)
            if not segment.is_over:
                segment.go_on()
        raise queue.Empty

    def get_nowait(self) -> Message:
        if self.chance.is_so(0.5):
            raise queue.Empty
        return self.get(0.0)

    def put(self, message: Message) -> None:
        """Segments keep what they have to say, until they are chosen."""

    # As what `Search` calls

    def _segment(self, trial: int, run: Any, slot: Any, threads: int, until: float | None, *rest: Any) -> Any:
        self.segments.append(FakeSegment(self, trial, run.of, slot, until))
        return self.segments[-1]

    def _prepare(self, setup: Setup, trial: Trial, run_dir: Path, extra: Any) -> Any:
        setup.recipe_of(trial.config, extra)
        run = self.runs.setdefault(run_dir.name, Run(trial.config))
        run.config = trial.config
        return SimpleNamespace(of=run, finished=run.summary)

    def _adopt(self, donor: Path, step: int, target: Path, recipe: Any) -> None:
        run = self.runs[donor.name]
        if step not in run.checkpoints:
            raise DamagedError(f"{donor.name} has no step {step}")
        self.adopted.append((donor.name, step, target.name))
        reports = [report for report in run.reports if report["step"] <= step]
        self.runs[target.name] = Run({}, {step: run.checkpoints[step]}, reports)

    def _reports(self, run_dir: Path) -> list[dict[str, Any]]:
        return list(self.runs[run_dir.name].reports) if run_dir.name in self.runs else []


class FakeSegment:
    """As `Segment`."""

    def __init__(self, world: World, trial: int, run: Run, slot: Any, until: float | None) -> None:
        self.trial, self.slot, self.began, self.step = trial, slot, 0.0, 0
        self.inbox: list[Message] = []
        self.is_over = False
        self._world, self._run = world, run
        self._stop: str | None = None
        train = world.setup.base.recipe.train
        per_unit = 1 if train.steps is not None else world.steps_per_epoch
        self._num_steps = train.steps or (train.epochs or 0) * per_unit
        pause = self._num_steps if until is None else math.ceil(round(until * per_unit, 6))
        self._pause = pause if pause < self._num_steps else None
        self._start()

    def stop(self, reason: str) -> None:
        self._stop = self._stop or reason

    def join(self) -> None:
        """It has ended."""

    def made(self) -> tuple[int, float]:
        return 0, 0.0

    def go_on(self) -> None:
        """The next thing that a worker does."""
        world, run, chance = self._world, self._run, self._world.chance
        if chance.is_so(chance.worker_killed):
            self.inbox = [message for message in self.inbox if not chance.is_so(chance.report_lost)]
            self.inbox.append(Message(self.trial, "note", {"name": "restart", "fields": {}}))
            self._start()
        elif chance.is_so(chance.place_lost):
            self._end(status="left", reason="no room")
        elif self._stop is not None and chance.is_so(0.3):
            run.checkpoints[self.step] = self._weights, self._metrics, self._evaluated
            self._end(status="interrupted", ended_by=self._stop, summary=self._summary("interrupted"))
        elif self._is_due() and self._evaluated != self.step:
            self._evaluate()
        elif self.step in (self._num_steps, self._pause) or self._is_unsaved():
            self._save()
        elif (kind := world.fails(run.config, self.step)) is not None:
            self._end(status="failed", kind=kind, reason=kind)
        else:
            self.step += 1
            self._weights = _hash(self._weights, sorted(run.config.items()), self.step)

    def _start(self) -> None:
        if self._run.checkpoints:
            self.step = max(self._run.checkpoints)
            self._weights, self._metrics, self._evaluated = self._run.checkpoints[self.step]
        else:
            self.step, self._weights, self._metrics, self._evaluated = 0, "new", {}, 0
        self._run.reports = [report for report in self._run.reports if report["step"] <= self.step]

    def _is_due(self) -> bool:
        every = self._world.setup.base.recipe.evaluate.every_steps or self._world.steps_per_epoch
        return self.step > 0 and (self.step in (self._num_steps, self._pause) or self.step % every == 0)

    def _is_unsaved(self) -> bool:
        return self.step > 0 and self.step % SAVE_EVERY == 0 and self.step not in self._run.checkpoints

    def _evaluate(self) -> None:
        place = int(_hash(self._weights, "value"), 16) / 16**16
        self._metrics = {"val_loss": math.nan if place < 0.03 else round(place, 2)}  # now and then the same
        self._evaluated = self.step
        epoch = self.step / self._world.steps_per_epoch
        self._run.reports.append({"step": self.step, "epoch": epoch, "metrics": dict(self._metrics)})
        report = SimpleNamespace(step=self.step, epoch=epoch, metrics=dict(self._metrics))
        self.inbox.append(Message(self.trial, "report", {"report": report}))

    def _save(self) -> None:
        self._run.checkpoints[self.step] = self._weights, self._metrics, self._evaluated
        if self.step == self._num_steps:
            self._run.summary = self._summary("done")
            self._end(status="done", ended_by="done", summary=self._run.summary)
        elif self.step == self._pause:
            self._end(status="interrupted", ended_by="pause", summary=self._summary("interrupted"))

    def _summary(self, status: str) -> dict[str, Any]:
        epoch = round(self.step / self._world.steps_per_epoch, 6)
        return {"status": status, "step": self.step, "epoch": epoch, "metrics": dict(self._metrics)}

    def _end(self, **fields: Any) -> None:
        self.is_over = True
        self.inbox.append(Message(self.trial, "ended", fields))


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
