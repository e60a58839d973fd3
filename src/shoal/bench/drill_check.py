"""Whether a broken run lost anything: functions from what two runs have written to what is missing."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.folder import step_folders
from shoal.core.process import choose_device
from shoal.observe.runs import read_events, read_metrics
from shoal.recipe.automatic import with_numerics
from shoal.recipe.schema import Recipe
from shoal.train.hardware import hardware_of

TOLERANCE = 1e-4
"""By how much a loss may differ where another number of workers adds up in another order."""
_COMPARABLE_STEPS = 20
"""For how many steps: rounding is amplified by every step, and in time it is as large as the loss."""


@dataclass(frozen=True)
class Outcome:
    """A run as it ended."""

    status: int
    summary: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    reports: Sequence[Mapping[str, Any]]
    complaint: str = ""
    checkpoints: Sequence[str] = ()
    """Names in the folder of its checkpoints."""

    @property
    def sizes(self) -> list[int]:
        """The number of workers at every start."""
        return [len(event["workers"]) for event in self.events if event["event"] == "workers"]

    @property
    def saved_steps(self) -> list[int]:
        """Where checkpoints were committed."""
        return [event["step"] for event in self.events if event["event"] == "save"]

    def training(self) -> list[Mapping[str, Any]]:
        """The reports of training steps."""
        return [report for report in self.reports if "train_loss" in report["metrics"]]

    def first(self, name: str, since: float) -> Mapping[str, Any] | None:
        """The first event of that name at `since` or later."""
        return next((event for event in self.events if event["event"] == name and event["time"] >= since), None)

    def longest_step_s(self) -> float:
        """Between two reports, the start and its first step not counted."""
        waits = [sum(s for name, s in report["seconds"].items() if name != "start") for report in self.reports[1:]]
        return max(waits, default=0.0)


def read_outcome(run_dir: Path, status: int, summary: Mapping[str, Any], complaint: str = "") -> Outcome:
    """What a run's folder tells of it."""
    names = sorted(path.name for path in (run_dir / "checkpoints").glob("*"))
    return Outcome(status, summary, read_events(run_dir), read_metrics(run_dir), complaint, names)


@dataclass(frozen=True)
class Comparison:
    """A broken run beside the undisturbed one."""

    losses: list[str]
    """What was lost, in words; nothing, if the list is empty."""
    same_weights: bool | None
    """None where nobody expects them to be: another number of workers adds up in another order."""
    loss_difference: float | None
    """The largest between the training losses of a step that can be compared; None where steps are missing."""
    compared: str
    """By what it was judged, in words."""


def compare(steady: Outcome, broken: Outcome, excuses: Sequence[str]) -> Comparison:
    """What `broken` lacks of `steady`; `excuses` are reasons why losses depend on the number of workers."""
    sha, expected = broken.summary.get("weights_sha256"), steady.summary["weights_sha256"]
    if broken.status != 0 or broken.summary.get("status") != "done":
        why = f": {broken.complaint}" if broken.complaint else ""
        return Comparison([f"the run ended with status {broken.status}{why}"], sha == expected, None, "its end")
    lost = _missing_steps(steady, broken)
    if lost:
        return Comparison(lost, sha == expected, None, "the steps that were trained")
    change = _first_change(steady, broken)
    lost += _leftovers(broken) + _other_values(steady, broken)
    exact = _loss_difference(steady, broken, 0, change)
    rough = (0.0, 0) if excuses else _loss_difference(steady, broken, change, change + _COMPARABLE_STEPS)
    for (difference, step), borne in ((exact, 0.0), (rough, TOLERANCE)):
        if difference > borne:
            lost.append(f"the training loss of step {step} differs by {difference:.2g}")
    if change == math.inf:
        if sha != expected:
            lost.append(f"the weights differ: {str(sha)[:16]} instead of {expected[:16]}")
        lost += _other_validation(steady, broken)
    same_weights = sha == expected if change == math.inf else None
    return Comparison(lost, same_weights, max(exact, rough)[0], _compared(change, excuses))


def _first_change(steady: Outcome, broken: Outcome) -> float:
    """The last step before the two were trained by different numbers of workers; infinite if they never were."""
    ours, theirs = _starts(steady), _starts(broken)
    steps = (report["step"] for report in steady.training())
    return next((step - 1 for step in steps if _size_at(ours, step) != _size_at(theirs, step)), math.inf)


def _starts(run: Outcome) -> list[tuple[int, int]]:
    """Step and number of workers, newest first."""
    starts = [event for event in run.events if event["event"] == "start"]
    return [(event["step"], event["world_size"]) for event in reversed(starts)]


def _size_at(starts: Sequence[tuple[int, int]], step: int) -> int | None:
    """The number of workers that trained a step, the last time that it was."""
    return next((size for start, size in starts if start < step), None)


def _compared(change: float, excuses: Sequence[str]) -> str:
    """What a run was judged by. A report tells how many samples a step had; that they were the same ones shows in the
    loss alone."""
    steps = "every step once, its number of samples and its learning rate"
    if change == math.inf:
        return f"weights, losses and validation metrics to the last bit; {steps}"
    exact = f"{steps}; losses to the last bit up to step {change}, where the number of workers changed"
    if excuses:
        return f"{exact}, and not after it: {', and '.join(excuses)}"
    return f"{exact}, and to {TOLERANCE:g} for {_COMPARABLE_STEPS} steps after it, before rounding grows"


def _missing_steps(steady: Outcome, broken: Outcome) -> list[str]:
    """Every step of the one must be among the other's, once."""
    expected = [report["step"] for report in steady.training()]
    found = [report["step"] for report in broken.training()]
    lost = []
    if missing := sorted(set(expected) - set(found)):
        lost.append(f"{len(missing)} steps are missing from metrics.jsonl, the first is {missing[0]}")
    if twice := sorted(step for step, count in Counter(found).items() if count > 1):
        lost.append(f"{len(twice)} steps are in metrics.jsonl more than once, the first is {twice[0]}")
    if extra := sorted(set(found) - set(expected)):
        lost.append(f"{len(extra)} steps too many in metrics.jsonl, the first is {extra[0]}")
    return lost


def _leftovers(broken: Outcome) -> list[str]:
    """What is half written or half deleted has a name that begins with a dot, and must be gone at the end of a run."""
    return [f"{name} was left among the checkpoints" for name in broken.checkpoints if name.startswith(".")]


def _other_values(steady: Outcome, broken: Outcome) -> list[str]:
    """Samples up to a step, and its learning rate, depend on nothing but the step."""
    lost = []
    for ours, theirs in zip(steady.training(), broken.training(), strict=True):
        if ours["samples"] != theirs["samples"]:
            lost.append(f"step {ours['step']} ends at sample {theirs['samples']:,} instead of {ours['samples']:,}")
        if ours["metrics"]["lr"] != theirs["metrics"]["lr"]:
            lost.append(f"step {ours['step']} has another learning rate")
        if lost:
            return lost
    return lost


def _loss_difference(steady: Outcome, broken: Outcome, after: float, up_to: float) -> tuple[float, int]:
    """The largest of those steps, and where; one that is not finite counts as the largest."""
    largest, where = 0.0, 0
    for ours, theirs in zip(steady.training(), broken.training(), strict=True):
        if not after < ours["step"] <= up_to:
            continue
        pair = (ours["metrics"]["train_loss"], theirs["metrics"]["train_loss"])
        # JSON has no nan: what was not finite was written as null.
        difference = math.inf if None in pair else abs(pair[0] - pair[1])
        if difference > largest:
            largest, where = difference, ours["step"]
    return largest, where


def _other_validation(steady: Outcome, broken: Outcome) -> list[str]:
    def validation(run: Outcome) -> list[tuple[int, dict[str, Any]]]:
        found = [(r["step"], {k: v for k, v in r["metrics"].items() if k.startswith("val_")}) for r in run.reports]
        return [(step, metrics) for step, metrics in found if metrics]

    return [] if validation(steady) == validation(broken) else ["the validation metrics differ"]


def excuses_of(recipe: Recipe, run_dir: Path) -> list[str]:
    """Why the losses of this recipe depend on the number of workers, by what an undisturbed run of it has saved."""
    found = []
    checkpoints = step_folders(run_dir / "checkpoints")
    if len({json.dumps(_generators(path)) for path in checkpoints}) > 1:
        found.append("the model draws random numbers, such as dropout, and each worker draws its own")
    if checkpoints and any(name.endswith("running_mean") for name in _tensor_names(checkpoints[-1])):
        found.append("batch norm sees the samples of one worker")
    precision = with_numerics(recipe, hardware_of(choose_device(recipe.cluster.gpus_per_worker))).train.precision
    if precision in ("bf16", "fp16"):
        found.append(f"train.precision is {precision}")
    if recipe.parallel.compress != "none":
        found.append(f"parallel.compress is {recipe.parallel.compress}")
    if recipe.parallel.sync_every > 1:
        found.append("parallel.sync_every lets workers go their own way in between")
    return found


def _generators(checkpoint: Path) -> Any:
    """The state of the random generators of every worker."""
    files = sorted(checkpoint.glob("worker-*.json"))
    return [json.loads(file.read_text(encoding="utf-8"))["rng"] for file in files]


def _tensor_names(checkpoint: Path) -> list[str]:
    """By the files' headers alone, which need no torch: a header's length in eight bytes, then JSON."""
    names: list[str] = []
    for shard in sorted(checkpoint.glob("shard-*.safetensors")):
        with shard.open("rb") as file:
            names += json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return names
