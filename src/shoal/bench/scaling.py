"""How throughput grows with workers, each on as many cores as any other; and Shoal beside hand-written torchrun DDP.

Every run is a `shoal train` of its own, as a user would start it. All of them go in turns, round after round, so that
noise hits them alike; ratios are taken within a round, and the median over the rounds is told. What counts is the time
of steps after the warm-up with all that lies between them, as the run itself has written it down: reports are in it,
start-up, evaluation and saving are not.

The share of communication is what exchanging gradients adds to a step: the same run is measured once more with workers
that step on their own (`parallel.sync_every` beyond the steps that count), and the share is what that saves. What
overlaps with the backward pass costs nothing and is not in it; waiting for a slower worker is.
"""

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shoal.bench.commands import Tell, in_turns, plain_ddp, run, shoal_train
from shoal.core.errors import UserError
from shoal.core.machine import usable_cores
from shoal.core.process import choose_device
from shoal.observe.phases import STEPPING
from shoal.observe.runs import read_events, read_metrics
from shoal.recipe.automatic import with_numerics
from shoal.recipe.load import LoadedRecipe, load_recipe
from shoal.recipe.schema import Recipe
from shoal.train.hardware import hardware_of

COMPUTE_BOUND: dict[str, Any] = {
    "name": "resnet18_32",
    "task": "image_classification",
    "model": "resnet18",
    "data": {"name": "synthetic", "samples": 4096, "val_samples": 8, "shape": [3, 32, 32]},
    "optim": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
    "train": {"steps": 1, "global_batch": 64},
    "cluster": {"threads_per_worker": 1},
}
"""Resnet18 on 32x32 images, 64 a worker: nearly all of a step is arithmetic."""

PLAIN = "plain torchrun"
PEER_WORKERS = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    max_workers: int | None = None
    """None: as many as the machine has cores for."""
    launcher: str = "ray"
    steps: int = 10
    """Steps of a run that count."""
    rounds: int = 5
    is_weak: bool = True
    """Each worker keeps its batch, however many there are; otherwise the global batch stays the same."""
    peer: bool = False

    @property
    def report_every(self) -> int:
        """Steps between two reports; the first so many steps are the warm-up."""
        return max(1, self.steps // 5)


def measure(loaded: LoadedRecipe, settings: Settings, tell: Tell = lambda line: None) -> dict[str, Any]:
    """Samples a second for each number of workers, and what follows from it."""
    recipe = loaded.recipe
    threads = recipe.cluster.threads_per_worker or 1
    counts = worker_counts(recipe, threads, settings, usable_cores())
    if settings.peer:
        check_peer(recipe, counts)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as temporary:
        contenders = _contenders(loaded, threads, counts, settings)
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(settings.rounds):
            for name in in_turns(contenders, number):
                folder = Path(temporary) / f"{number} {name}"
                folder.mkdir()
                rates[name].append(contenders[name](folder))
                tell(f"round {number + 1} of {settings.rounds}, {name}: {rates[name][-1]:,.1f} samples/s")
        num_samples = _num_samples(Path(temporary))
    result = {
        "recipe": recipe.name,
        "launcher": settings.launcher,
        "scaling": "weak" if settings.is_weak else "strong",
        "batch_per_worker": recipe.train.global_batch // recipe.cluster.workers if settings.is_weak else None,
        "threads_per_worker": threads,
        "steps": settings.steps,
        "rounds": settings.rounds,
        "workers": scaling_rows(counts, rates, num_samples),
        "rates": rates,
    }
    if settings.peer:
        result["peer"] = peer_row(rates)
    return result


def worker_counts(recipe: Recipe, threads: int, settings: Settings, cores: int) -> list[int]:
    """1, 2, 3, 4, then doubled, and the most; for strong scaling those that divide the global batch."""
    most = settings.max_workers or max(1, cores // threads)
    if most * threads > cores:
        raise UserError(
            f"--max-workers: {most} workers with {threads} threads each need {most * threads} cores and this machine "
            f"has {cores}; give at most {cores // threads}, or lower cluster.threads_per_worker"
        )
    counts = [count for count in range(1, most + 1) if count <= 4 or count == most or count.bit_count() == 1]
    return [count for count in counts if settings.is_weak or recipe.train.global_batch % count == 0]


def check_peer(recipe: Recipe, counts: Iterable[int]) -> None:
    """Refuse what the hand-written script does not do: the two would not train the same."""
    if PEER_WORKERS not in counts:
        raise UserError(f"--peer: compares {PEER_WORKERS} workers, which are not measured here; raise --max-workers")
    if recipe.model is None or recipe.data is None:
        raise UserError(f"--peer: needs the recipe's own data: and model:, but task {recipe.task.name} brings them")
    parallel = recipe.parallel.model_copy(update={"strategy": "ddp"})  # which is what the peer does
    hardware = hardware_of(choose_device(recipe.cluster.gpus_per_worker))
    train = with_numerics(recipe.model_copy(update={"parallel": parallel}), hardware).train
    for name, is_set in (
        ("train.precision fp16", train.precision == "fp16"),
        ("train.compile", train.compile is True),
        ("train.micro_batch", train.micro_batch is not None),
        ("train.activation_checkpointing", train.activation_checkpointing),
        ("parallel.compress", parallel.compress != "none"),
        ("parallel.sync_every", parallel.sync_every > 1),
    ):
        if is_set:
            raise UserError(f"--peer: the hand-written script has no {name}; turn it off, or measure without --peer")


def _contenders(
    loaded: LoadedRecipe, threads: int, counts: Iterable[int], settings: Settings
) -> dict[str, Callable[[Path], float]]:
    """What is measured, by name; recipes are made here, so that a wrong one shows before the first run."""
    contenders: dict[str, Callable[[Path], float]] = {}
    for workers in counts:
        together = recipe_for(loaded, workers, threads, settings)
        contenders[_name(workers)] = partial(_run_shoal, together, settings, last_counts=True)
        if workers > 1 and loaded.recipe.train.precision != "fp16":  # whose loss scale needs all workers
            alone = recipe_for(loaded, workers, threads, settings, apart=True)
            contenders[_apart(workers)] = partial(_run_shoal, alone, settings, last_counts=False)
    if settings.peer:
        recipe = recipe_for(loaded, PEER_WORKERS, threads, settings)
        contenders[PLAIN] = partial(_run_plain, recipe, settings)
    return contenders


def recipe_for(
    loaded: LoadedRecipe, workers: int, threads: int, settings: Settings, apart: bool = False
) -> LoadedRecipe:
    """The recipe of one run; `apart`: gradients are not exchanged, but for a last step that does not count."""
    recipe, every = loaded.recipe, settings.report_every
    every_sync = recipe.parallel.sync_every
    steps = -(-(every + settings.steps + (every if apart else 0)) // every_sync) * every_sync
    overrides: dict[str, Any] = {
        "train.steps": steps,
        "evaluate.every_steps": steps,
        "checkpoint.every_steps": steps,
        "early_stop": None,
        "observe.every_steps": every,
        "cluster.workers": workers,
        "cluster.min_workers": None,
        "cluster.threads_per_worker": threads,
        "cluster.pin_cores": True,
    }
    if settings.is_weak:
        overrides["train.global_batch"] = recipe.train.global_batch // recipe.cluster.workers * workers
    if apart:
        overrides |= {"parallel.sync_every": steps, "parallel.compress": "none"}
        overrides |= {"parallel.hierarchical": False, "parallel.sync_batch_norm": False}
    return load_recipe([loaded.tree()], overrides)


def _run_shoal(loaded: LoadedRecipe, settings: Settings, folder: Path, last_counts: bool) -> float:
    (folder / "recipe.yaml").write_text(loaded.to_yaml(), encoding="utf-8")
    run(shoal_train(folder / "recipe.yaml", folder / "run", settings.launcher), folder / "log")
    return steady_rate(read_metrics(folder / "run"), settings.report_every, last_counts)


def _run_plain(loaded: LoadedRecipe, settings: Settings, folder: Path) -> float:
    recipe, warmup = loaded.recipe, settings.report_every
    (folder / "recipe.yaml").write_text(loaded.to_yaml(), encoding="utf-8")
    arguments = ["--recipe", str(folder / "recipe.yaml"), "--batch", str(recipe.train.global_batch // PEER_WORKERS)]
    arguments += ["--steps", str(warmup + settings.steps), "--warmup", str(warmup), "--pin"]
    arguments += ["--threads", str(recipe.cluster.threads_per_worker)]
    arguments += ["--gpu"] if _has_gpus(recipe) else []
    run(plain_ddp(PEER_WORKERS, folder / "result.json", *arguments), folder / "log")
    return float(json.loads((folder / "result.json").read_text())["samples_per_s"])


def _has_gpus(recipe: Recipe) -> bool:
    from shoal.core.process import choose_device

    return choose_device(recipe.cluster.gpus_per_worker).type == "cuda"


def steady_rate(reports: Iterable[Mapping[str, Any]], warmup: int, last_counts: bool = True) -> float:
    """Samples a second over the reports after the warm-up, by all the seconds that went by."""
    steady = [report for report in reports if report["step"] > warmup and "samples_per_s" in report["metrics"]]
    steady = steady if last_counts else steady[:-1]
    samples = sum(
        report["metrics"]["samples_per_s"] * sum(report["seconds"].get(phase, 0.0) for phase in STEPPING)
        for report in steady
    )
    return float(samples / sum(sum(report["seconds"].values()) for report in steady))


def scaling_rows(counts: Iterable[int], rates: Mapping[str, list[float]], num_samples: int) -> list[dict[str, Any]]:
    """One row for each number of workers; the first is what the others are compared with."""
    base = rates[_name(1)]
    rows = []
    for workers in counts:
        mine, alone = rates[_name(workers)], rates.get(_apart(workers))
        speed_up = statistics.median(_ratios(mine, base))
        rows.append(
            {
                "workers": workers,
                "samples_per_s": statistics.median(mine),
                "epoch_s": num_samples / statistics.median(mine),
                "speed_up": speed_up,
                "efficiency": speed_up / workers,
                # Below nothing is noise.
                "communication": max(0.0, 1 - statistics.median(_ratios(mine, alone))) if alone else None,
            }
        )
    return rows


def peer_row(rates: Mapping[str, list[float]]) -> dict[str, Any]:
    """Shoal against the hand-written script; above 1 Shoal is faster."""
    ratios = _ratios(rates[_name(PEER_WORKERS)], rates[PLAIN])
    return {
        "workers": PEER_WORKERS,
        "samples_per_s": statistics.median(rates[PLAIN]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """The result as rows of text, headed."""
    lines = [["workers", "epoch", "samples/s", "speed-up", "efficiency", "communication"]]
    for row in result["workers"]:
        share = row["communication"]
        lines.append(
            [
                str(row["workers"]),
                f"{row['epoch_s']:.1f} s",
                f"{row['samples_per_s']:,.1f}",
                f"{row['speed_up']:.2f}",
                f"{row['efficiency']:.1%}",
                "" if row["workers"] == 1 else "unknown" if share is None else f"{share:.1%}",
            ]
        )
    if peer := result.get("peer"):
        lines.append([f"{peer['workers']} ({PLAIN})", "", f"{peer['samples_per_s']:,.1f}", "", "", ""])
    return lines


def _ratios(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _num_samples(folder: Path) -> int:
    """Training samples, as the first run has counted them."""
    events = read_events(folder / f"0 {_name(1)}" / "run")
    return next(int(event["train_samples"]) for event in events if event["event"] == "start")


def _name(workers: int) -> str:
    return f"{workers} worker{'s' * (workers > 1)}"


def _apart(workers: int) -> str:
    return f"{_name(workers)} apart"
