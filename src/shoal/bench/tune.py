"""What a search costs beside its trials: equal trials on a few places, by Shoal and by Ray Tune as users write it.

All train the same small model for as many steps, on a Ray cluster that runs already, in turns. A trial's own training
time is from its first step to its last, by its own clock. The best that a search of equal trials can do is the sum of
these over the places; what it takes beyond that is its own.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bench.cluster import running_cluster
from shoal.bench.commands import PEERS, Tell, digits_like, in_turns, run
from shoal.core.storage import read_json_lines
from shoal.observe.runs import read_events

CONTENDERS = ("shoal", "ray_tune", "ray_tune_train")
MOST_WALL, MOST_START_S = 1.05, 5.0
"""What is promised: wall time over the best possible, startup excluded, and seconds to a trial's first step."""


@dataclass(frozen=True)
class Timed:
    """A search, in unix seconds."""

    began: float
    """When it had a cluster and began with its trials."""
    ended: float
    trials: list[tuple[float, float, float]]
    """Of each trial: when it was given a place, its first step, its last."""

    def to_record(self, slots: int) -> dict[str, float]:
        """Seconds and ratios."""
        best_s = sum(last - first for _, first, last in self.trials) / slots
        starts = [first - began for began, first, _ in self.trials]
        wall_s = self.ended - self.began
        return {
            "wall_s": wall_s,
            "training_s": best_s,
            "ratio": wall_s / best_s,
            "ratio_without_starts": (wall_s - sum(starts) / slots) / best_s,
            "start_s": statistics.median(starts),
            "longest_start_s": max(starts),
        }


def measure(
    trials: int, slots: int, steps: int, rounds: int, names: Sequence[str], tell: Tell = lambda line: None
) -> dict[str, Any]:
    """Of each contender the medians over the rounds, and all rounds."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as temporary,
        running_cluster(slots) as (address, variables),
    ):
        for number in range(rounds):
            for name in in_turns(names, number):
                folder = Path(temporary) / f"{number}-{name}"
                folder.mkdir()
                timed = _run(name, trials, slots, steps, folder, address, variables)
                found[name].append(timed.to_record(slots))
                tell(f"round {number + 1} of {rounds}, {name}: {found[name][-1]['wall_s']:.1f} s")
    medians = {
        name: {key: statistics.median(record[key] for record in records) for key in records[0]}
        for name, records in found.items()
    }
    given = {"trials": trials, "slots": slots, "steps": steps, "rounds": rounds}
    return given | {"contenders": medians, "by_round": found}


def _run(
    name: str, trials: int, slots: int, steps: int, folder: Path, address: str, variables: Mapping[str, str]
) -> Timed:
    if name == "shoal":
        return _shoal(trials, slots, steps, folder, address, variables)
    out = folder / "out"
    script = [sys.executable, str(PEERS / "plain_ray_tune.py"), "--out", str(out), "--address", address]
    numbers = ["--trials", str(trials), "--slots", str(slots), "--steps", str(steps)]
    run([*script, *numbers, *(["--nested"] if name == "ray_tune_train" else [])], folder / "log", variables)
    search, *records = read_json_lines(out)
    return Timed(search["began"], search["ended"], [(r["began"], r["first"], r["last"]) for r in records])


def _shoal(trials: int, slots: int, steps: int, folder: Path, address: str, variables: Mapping[str, str]) -> Timed:
    recipe, space, search = folder / "recipe.yaml", folder / "space.yaml", folder / "search"
    # Nothing but steps, as the peers do: no evaluation but the last, no checkpoint but the last.
    sections = {
        "train": {"steps": steps, "global_batch": 32},
        "evaluate": {"every_steps": steps},
        "checkpoint": {"every_steps": steps},
        "observe": {"every_steps": 100},
    }
    recipe.write_text(json.dumps(digits_like(1, **sections)))
    space.write_text(f"train.seed: grid({', '.join(map(str, range(trials)))})\n")
    words = ["tune", str(recipe), str(space), "--search-dir", str(search), "--address", address]
    command = [sys.executable, "-m", "shoal.cli.main", *words, "--concurrency", str(slots), "--metric", "val_loss"]
    run(command, folder / "log", variables)
    events = list(read_json_lines(search / "journal.jsonl"))
    given = {event["trial"]: event["time"] for event in events if event["event"] == "run"}
    timed = [(given[number], *_first_and_last(search / "trials" / f"{number:04d}")) for number in range(trials)]
    began = next(event["time"] for event in events if event["event"] == "start")
    return Timed(began, max(event["time"] for event in events if event["event"] == "ended"), timed)


def _first_and_last(run_dir: Path) -> tuple[float, float]:
    times = {event["event"]: event["time"] for event in read_events(run_dir)}
    return times["first_step"], times["done"]


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """A row a contender, headed."""
    names = ("wall", "training", "wall / training", "without starts", "start of a trial", "longest")
    rows = [[f"{result['trials']} trials, {result['slots']} at a time", *names]]
    for name, one in result["contenders"].items():
        times = [f"{one['wall_s']:.1f} s", f"{one['training_s']:.1f} s"]
        ratios = [f"{one['ratio']:.3f}", f"{one['ratio_without_starts']:.3f}"]
        rows.append([name, *times, *ratios, f"{one['start_s']:.2f} s", f"{one['longest_start_s']:.2f} s"])
    return rows
