"""Trials that never ran: made by hand, or by a search whose trials are numbers and whose workers are dice."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.tune.schedulers.moves import Exploit, Go, Move, Scheduler
from shoal.tune.space import Config
from shoal.tune.trial import Objective, Result, Status, Trial, apply

LOSS = Objective("val_loss", is_less_better=True)
ACCURACY = Objective("val_accuracy", is_less_better=False)
BOTH = [LOSS, ACCURACY]


def made(
    number: int,
    values: Sequence[float | None] = (),
    status: Status = "running",
    config: Config | None = None,
    objective: Objective = LOSS,
    kind: str = "",
) -> Trial:
    """A trial with one evaluation an epoch."""
    results = [
        Result(10 * epoch, float(epoch), {objective.metric: value})  # type: ignore[dict-item]
        for epoch, value in enumerate(values, 1)
    ]
    return Trial(number, config or {}, status, results, kind=kind)


def by_number(*trials: Trial) -> dict[int, Trial]:
    """As a search keeps them."""
    return {trial.number: trial for trial in trials}


class MadeSearch:
    """What `Search` does, without runs: trials take places, train an epoch at a time in a random order, and end."""

    def __init__(
        self,
        scheduler: Scheduler,
        num_trials: int,
        length: int,
        value_of: Callable[[Trial, float], float | None],
        propose: Callable[[int], Config] = lambda number: {"optim.lr": 10.0**-number},
        fails: Mapping[int, float] | None = None,
        slots: int = 3,
        seed: int = 0,
        objective: Objective = LOSS,
        overshoot: Callable[[int], float] = lambda number: 0.0,
    ) -> None:
        self.scheduler, self.num_trials, self.length, self.objective = scheduler, num_trials, length, objective
        self.value_of, self.propose, self.fails, self.slots = value_of, propose, dict(fails or {}), slots
        self.overshoot = overshoot
        self.random = random.Random(seed)
        self.trials: dict[int, Trial] = {}
        self.events: list[dict[str, Any]] = []
        self.running: dict[int, float | None] = {}
        self.made = 0.0
        """Epochs that were trained."""

    def run(self) -> dict[int, Trial]:
        """Until nothing runs any more."""
        while True:
            moves = self.scheduler.moves(self.trials, len(self.trials) < self.num_trials)
            if moves:
                self.note("moves", moves=[as_event(move) for move in moves])
            self.start_some()
            if not self.running:
                return self.trials
            self.train(self.random.choice(sorted(self.running)))

    def start_some(self) -> None:
        while len(self.running) < self.slots:
            waiting = [trial for trial in self.trials.values() if trial.status == "waiting"]
            if not waiting and len(self.trials) == self.num_trials:
                return
            if waiting:
                trial = min(waiting, key=lambda trial: (trial.starts == 0, trial.number))
            else:
                number = len(self.trials)
                self.note("trial", trial=number, config=self.propose(number))
                trial = self.trials[number]
            until = self.scheduler.until(trial)
            self.note("run", trial=trial.number, until=until)
            self.running[trial.number] = until

    def train(self, number: int) -> None:
        trial = self.trials[number]
        progress = round(trial.progress) + 1 + self.overshoot(number)
        self.made += 1
        if progress >= self.fails.get(number, float("inf")) and trial.generation == 0:
            self.end(number, "ended", status="failed", kind="diverged", reason="no number")
            return
        metrics = {self.objective.metric: self.value_of(trial, progress)}
        fields = {"trial": number, "step": int(10 * progress), "progress": progress, "metrics": metrics}
        apply(self.trials, {"event": "result", **fields})
        stop = self.scheduler.verdict(trial, self.trials)
        trial.stop = stop
        self.events.append({"event": "result", **fields, "stop": stop})
        until = self.running[number]
        if stop is not None:
            self.end(number, "ended", status="stopped", reason=stop)
        elif progress >= self.length:
            self.end(number, "ended", status="done", summary={"step": int(10 * progress)})
        elif until is not None and progress >= until - 1e-9:
            self.end(number, "paused")

    def end(self, number: int, event: str, **fields: Any) -> None:
        del self.running[number]
        self.note(event, trial=number, busy_s=1.0, made=1.0, **fields)

    def note(self, event: str, **fields: Any) -> None:
        record = json.loads(json.dumps({"event": event, **fields}))
        self.events.append(record)
        apply(self.trials, record)


def as_event(move: Move) -> dict[str, Any]:
    """A move as the journal has it."""
    if isinstance(move, Go):
        return {"move": "go", "trial": move.trial}
    if not isinstance(move, Exploit):
        return {"move": "stop", "trial": move.trial, "reason": move.reason}
    return {
        "move": "exploit",
        "trial": move.trial,
        "from": move.donor,
        "progress": move.progress,
        "config": move.config,
    }
