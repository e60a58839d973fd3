"""From the command to the first optimizer step: Shoal under each of its launchers beside scripts written by hand.

All train the same small model on random images, and go in turns, round after round. The time is taken from outside:
from starting the command to the end of the first step as rank 0 writes it down. For runs on a running cluster one is
started in every round, and stopped after them, so that it is in nobody else's way.
"""

import json
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.bench.cluster import running_cluster
from shoal.bench.commands import Tell, digits_like, in_turns, plain_ddp, plain_ray_train, run, shoal_train
from shoal.core.errors import UserError
from shoal.core.machine import usable_cores
from shoal.core.storage import read_json_lines
from shoal.observe.runs import read_events

ALONE = ("torchrun", "ray_train", "shoal_torchrun", "shoal_local", "shoal_ray")
"""Those that find nothing running."""
RUNNING = ("ray_train_running", "shoal_ray_running")
"""Those on a Ray cluster that runs already."""
CONTENDERS = (*ALONE, *RUNNING)
RATIOS = {
    "shoal_ray / ray_train": ("shoal_ray", "ray_train", 0.5),
    "shoal_ray_running / torchrun": ("shoal_ray_running", "torchrun", 1.5),
}
"""What is promised: ours, theirs, and the most that the first may take of the second."""
PHASES = {
    "python": "Python starts",
    "prepared": "command line and recipe",
    "connected": "Ray starts, or is reached",
    "agents": "a place for each worker",
    "trainer": "processes, with torch imported",
    "joined": "workers meet",
    "built": "data, model and optimizer",
    "first_step": "run folder and first step",
}
"""Where a start of Shoal spends its time; a phase is over when its mark is set."""


def measure(workers: int, rounds: int, names: Sequence[str], tell: Tell = lambda line: None) -> dict[str, Any]:
    """Seconds to the first step of each contender, the ratios that are promised, and Shoal's budget by phase."""
    if workers > usable_cores():
        raise UserError(f"--workers: {workers} workers need as many cores and this machine has {usable_cores()}")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as temporary:
        for number in range(rounds):

            def take(name: str, address: str | None = None, environment: Mapping[str, str] | None = None) -> None:
                folder = Path(temporary) / f"{number} {name}"  # noqa: B023 - called within the round
                folder.mkdir()
                found[name].append(_run(name, workers, folder, address, environment))
                took_s = sum(found[name][-1].values())
                tell(f"round {number + 1} of {rounds}, {name}: {took_s:.1f} s")  # noqa: B023

            for name in in_turns([name for name in names if name in ALONE], number):
                take(name)
            if on_cluster := in_turns([name for name in names if name in RUNNING], number):
                with running_cluster(usable_cores()) as (address, environment):
                    for name in on_cluster:
                        take(name, address, environment)
    return {"workers": workers, "rounds": rounds} | summed_up(found)


def _run(
    name: str, workers: int, folder: Path, address: str | None, environment: Mapping[str, str] | None
) -> dict[str, float]:
    """Seconds by phase to the first step; of a script written by hand, which has none, as one."""
    out, log = folder / "out", folder / "log"
    if name == "torchrun":
        began = run(plain_ddp(workers, out), log)
        return {"first_step": json.loads(out.read_text())["first_step"] - began}
    if name.startswith("ray_train"):
        where = ["--address", address] if address else []
        began = run(plain_ray_train(workers, out, *where), log, environment)
        return {"first_step": next(line["time"] for line in read_json_lines(out) if line["rank"] == 0) - began}
    (folder / "recipe.yaml").write_text(json.dumps(digits_like(workers)), encoding="utf-8")
    launcher = name.split("_")[1]
    began = run(shoal_train(folder / "recipe.yaml", folder / "run", launcher, address), log, environment)
    return phases(read_events(folder / "run"), json.loads((folder / "run" / "summary.json").read_text()), began)


def phases(events: Iterable[Mapping[str, Any]], summary: Mapping[str, Any], began: float) -> dict[str, float]:
    """Seconds that each phase took, by the marks that the run has left; they add up to the time to the first step."""
    by_name = {event["event"]: event for event in reversed(list(events))}
    first_step_s = by_name["first_step"]["time"] - began
    # What the run calls its beginning is when Python had come to Shoal's first lines.
    python_s = max(0.0, first_step_s - summary["time_to_first_step_s"])
    marks = {name: python_s + seconds for name, seconds in by_name["start"]["startup_s"].items()}
    marks |= {"python": python_s, "first_step": first_step_s}
    spent: dict[str, float] = {}
    last = 0.0
    for name in PHASES:
        if name in marks:
            spent[name], last = marks[name] - last, marks[name]
    return spent


def summed_up(found: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds; ratios are taken within a round."""
    seconds = {name: [sum(spent.values()) for spent in rounds] for name, rounds in found.items()}
    ratios = {}
    for title, (ours, theirs, goal) in RATIOS.items():
        if ours in seconds and theirs in seconds:
            each = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
            ratios[title] = {"ratio": statistics.median(each), "goal": goal, "ratios": each}
    budget = {
        name: {phase: statistics.median(spent[phase] for spent in rounds) for phase in PHASES if phase in rounds[0]}
        for name, rounds in found.items()
        if name.startswith("shoal")
    }
    return {
        "first_step_s": {name: statistics.median(each) for name, each in seconds.items()},
        "ratios": ratios,
        "phases_s": budget,
        "seconds": seconds,
    }


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Contenders and ratios as rows of text, headed."""
    lines = [["to the first step", "seconds"]]
    lines += [[name, f"{seconds:.1f}"] for name, seconds in result["first_step_s"].items()]
    for title, found in result["ratios"].items():
        lines.append([title, f"{found['ratio']:.2f} (goal: at most {found['goal']:g})"])
    return lines


def budget_table(result: Mapping[str, Any]) -> list[list[str]]:
    """Phases of Shoal's starts as rows of text, headed; none where Shoal was not measured."""
    budget = result["phases_s"]
    if not budget:
        return []
    lines = [["phase, in seconds", *budget]]
    for phase, words in PHASES.items():
        cells = [f"{spent[phase]:.2f}" if phase in spent else "" for spent in budget.values()]
        if any(cells):
            lines.append([words, *cells])
    return lines
