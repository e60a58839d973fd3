"""What a search has found: the best trial, what stopping early has saved, the front of several objectives."""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.tune.setup import Setup
from shoal.tune.trial import Objective, Trial


def best_trial(trials: Mapping[int, Trial], objective: Objective) -> Trial | None:
    """The trial with the best value, as it was when it had that; one that failed only where no other has any."""
    lives = [life for trial in trials.values() for life in trial.lives()]
    rated = [life for life in lives if life.value(objective) is not None]
    return min(
        rated,
        key=lambda life: (life.status == "failed", objective.loss(life.value(objective)), life.number),
        default=None,
    )


def searched_s(events: Iterable[Mapping[str, Any]]) -> float:
    """Seconds that a search has taken, without those in which nobody searched."""
    total = began = last = 0.0
    for event in events:
        if event["event"] == "start":
            total += last - began
            began = event.get("began", event["time"])
        last = event["time"]
    return round(total + last - began, 1)


def is_over(trials: Mapping[int, Trial], setup: Setup) -> bool:
    """Whether nothing is left to do."""
    return len(trials) == setup.num_trials and all(trial.is_ended for trial in trials.values())


def pareto_front(trials: Mapping[int, Trial], objectives: Sequence[Objective]) -> list[Trial]:
    """Trials that none is better than in all objectives, by their values where the first is best."""
    rated = {}
    for trial in trials.values():
        found = zip(objectives, trial.values(objectives), strict=True)
        losses = tuple(objective.loss(value) for objective, value in found)
        if all(math.isfinite(loss) for loss in losses):
            rated[trial.number] = losses
    front = [
        number
        for number, own in rated.items()
        if not any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in rated.values())
    ]
    return [trials[number] for number in sorted(front, key=lambda number: (rated[number], number))]


def counts(trials: Mapping[int, Trial]) -> dict[str, int]:
    """status -> trials"""
    found = Counter(trial.status for trial in trials.values())
    return {
        status: found[status]
        for status in ("running", "waiting", "paused", "done", "stopped", "failed")
        if found[status]
    }


def saved_share(trials: Mapping[int, Trial], setup: Setup) -> float:
    """Of what it would take to run all trials to the end, the share that stopping some of them has saved."""
    stopped = [trial for trial in trials.values() if trial.status == "stopped"]
    whole = sum(setup.length_of(trial.config) for trial in trials.values())
    return sum(max(0.0, setup.length - trial.made) for trial in stopped) / whole if whole else 0.0


def importance(trials: Mapping[int, Trial], setup: Setup) -> dict[str, float]:
    """How much of what trials differ in goes back to each field: by a forest of trees over all of them, in shares.

    Empty where there are too few trials to tell.
    """
    rated = [trial for trial in trials.values() if trial.value(setup.objective) is not None]
    keys = setup.space.keys
    if len(rated) < max(6, 2 * len(keys)):
        return {}
    import numpy as np
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    domains = {key: setup.space.domain(key) for key in keys}
    rows = np.array([[domains[key].place(t.config[key]) if key in t.config else -1.0 for key in keys] for t in rated])
    # Ranks, because one trial that went wrong by orders of magnitude would be all that is explained.
    losses = [setup.objective.loss(trial.value(setup.objective)) for trial in rated]
    values = np.unique(losses, return_inverse=True)[1]
    forest = RandomForestRegressor(n_estimators=100, min_samples_leaf=2, random_state=0).fit(rows, values)
    found = np.clip(
        permutation_importance(forest, rows, values, n_repeats=10, random_state=0).importances_mean, 0, None
    )
    total = float(found.sum())
    if total <= 0:
        return {}
    shares = {key: round(float(value) / total, 4) for key, value in zip(keys, found, strict=True)}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def trial_record(trial: Trial, setup: Setup, run_dir: Path) -> dict[str, Any]:
    """A trial in numbers."""
    best = trial.best(setup.objective)
    record: dict[str, Any] = {
        "trial": trial.number,
        "status": trial.status,
        "config": trial.config,
        "value": trial.value(setup.objective),
        "values": dict(zip((o.metric for o in setup.objectives), trial.values(setup.objectives), strict=True)),
        "last": trial.last_value(setup.objective),
        "step": trial.results[-1].step if trial.results else 0,
        setup.unit: trial.progress,
        "best_step": best.step if best else None,
        f"{setup.unit}_trained": round(trial.made, 4),
        "busy_s": round(trial.busy_s, 1),
        "starts": trial.starts,
        "first_step_s": trial.first_step_s,
        "run_dir": str(run_dir),
    }
    if trial.reason:
        record |= {"reason": trial.reason}
    if trial.kind:
        record |= {"kind": trial.kind}
    if trial.traceback:
        record |= {"traceback": trial.traceback}
    if trial.lineage:
        record |= {"lineage": trial.lineage}
    return record


def trials_csv(records: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """A line a trial."""
    out = io.StringIO()
    names = ["trial", "status", "value", "step", "busy_s", "reason", "run_dir"]
    metrics = list(records[0]["values"]) if records else []
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *metrics, *keys])
    for record in records:
        config = [_cell(record["config"][key]) if key in record["config"] else "" for key in keys]
        writer.writerow([*(record.get(name, "") for name in names), *record["values"].values(), *config])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """A setting as a recipe has it: true, null, [64, "a"]."""
    return json.dumps(value) if value is None or isinstance(value, bool | list) else value


def summarise(trials: Mapping[int, Trial], setup: Setup, folder: Path, status: str, wall_s: float) -> dict[str, Any]:
    """What `shoal tune --json` ends with."""
    records = [trial_record(trial, setup, folder / "trials" / trial.name) for trial in trials.values()]
    best = best_trial(trials, setup.objective)
    firsts = sorted(seconds for trial in trials.values() for seconds in trial.first_step_s)
    summary: dict[str, Any] = {
        "search": folder.name,
        "search_dir": str(folder),
        "status": status,
        "metric": setup.objective.metric,
        "mode": "min" if setup.objective.is_less_better else "max",
        "scheduler": setup.section.scheduler,
        "searched_by": setup.section.search,
        "num_trials": setup.num_trials,
        "trials_by_status": counts(trials),
        "best": None if best is None else trial_record(best, setup, folder / "trials" / best.name),
        "unit": setup.unit,
        "trained": round(sum(trial.made for trial in trials.values()), 4),
        "trained_if_all_to_the_end": sum(setup.length_of(trial.config) for trial in trials.values()),
        "saved": round(saved_share(trials, setup), 4),
        "exploits": sum(trial.generation for trial in trials.values()),
        "importance": importance(trials, setup),
        "wall_s": round(wall_s, 1),
        "busy_s": round(sum(trial.busy_s for trial in trials.values()), 1),
        "first_step_s": {"median": firsts[len(firsts) // 2], "longest": firsts[-1]} if firsts else None,
        "best_recipe": str(folder / "best.yaml") if best is not None else None,
        "trials": records,
    }
    if len(setup.objectives) > 1:
        front = pareto_front(trials, setup.objectives)
        summary["objectives"] = [objective.to_text() for objective in setup.objectives]
        summary["pareto"] = [trial.number for trial in front]
    return summary
