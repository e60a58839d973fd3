"""What communication costs: how fast workers exchange data, and how much of a step goes into waiting for it.

Collectives are timed by size, in turns, round after round. For the share of a step, each setting trains a few steps
of one recipe under a profiler: exposed is the time in which something is under way between the workers and this one
computes nothing. What is hidden behind computing is told beside it. Waiting for a slower worker is communication too,
and so is that of a pipeline's stage for its turn.
"""

import itertools
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bench.commands import Tell
from shoal.bench.workers import run_job
from shoal.core.errors import RunError, UserError
from shoal.core.machine import usable_cores
from shoal.launch.environment import nccl_environment
from shoal.recipe.load import LoadedRecipe, load_recipe
from shoal.recipe.schema import Recipe

SMALL_VIT: dict[str, Any] = {
    "name": "small_vit",
    "task": "image_classification",
    "model": {"name": "vit", "dim": 256, "layers": 8, "heads": 4},
    "data": {"name": "synthetic", "samples": 4096, "val_samples": 8, "shape": [3, 28, 28]},
    "optim": {"name": "adamw", "lr": 0.001},
    "train": {"steps": 1, "global_batch": 16},
}
"""6.4 million weights, which every strategy can divide."""
TINY_VIT = SMALL_VIT | {"name": "tiny_vit", "model": {"name": "vit", "dim": 32, "layers": 4, "heads": 2}}

_ACCUMULATE = "accumulate"
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.strategy": "ddp"},
    "ddp_bf16": {"parallel.strategy": "ddp", "parallel.compress": "bf16"},
    "ddp_fp16": {"parallel.strategy": "ddp", "parallel.compress": "fp16"},
    "ddp_powersgd": {"parallel.strategy": "ddp", "parallel.compress": "powersgd", "parallel.powersgd_start_step": 2},
    "ddp_hierarchical": {"parallel.strategy": "ddp", "parallel.hierarchical": True},
    "ddp_accumulate_2": {"parallel.strategy": "ddp", _ACCUMULATE: 2},
    "ddp_accumulate_4": {"parallel.strategy": "ddp", _ACCUMULATE: 4},
    "fsdp": {"parallel.strategy": "fsdp"},
    "fsdp_accumulate_4": {"parallel.strategy": "fsdp", _ACCUMULATE: 4},
    "zero1": {"parallel.strategy": "deepspeed", "parallel.deepspeed.stage": 1},
    "zero2": {"parallel.strategy": "deepspeed", "parallel.deepspeed.stage": 2},
    "zero3": {"parallel.strategy": "deepspeed", "parallel.deepspeed.stage": 3},
    "gpipe": {"parallel.strategy": "pipeline", "parallel.pipeline.schedule": "gpipe"},
    "1f1b": {"parallel.strategy": "pipeline", "parallel.pipeline.schedule": "1f1b"},
    "interleaved": {"parallel.strategy": "pipeline", "parallel.pipeline.schedule": "interleaved"},
    "tensor": {"parallel.strategy": "tensor"},
}
"""What is laid over the recipe; `accumulate` is how many times its batch a step has, in micro-batches of one size."""
_PLAIN = {"parallel.compress": "none", "parallel.hierarchical": False, "parallel.sync_every": 1}

SIZES = tuple(4096 * 4**power for power in range(8))
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SMALLEST, _LARGEST = 64, 4 << 30


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    workers: int = 2
    sizes: tuple[int, ...] = SIZES
    """Bytes, smallest first."""
    rounds: int = 5
    """Of the collectives."""
    steps: int = 6
    """Of each setting, by the clock and once more under the profiler."""
    names: tuple[str, ...] = tuple(SETTINGS)


QUICK = Settings(sizes=(4096, 1 << 20), rounds=2, steps=2)


def parse_sizes(text: str) -> tuple[int, ...]:
    """`4KiB,1MiB` in bytes, smallest first."""
    sizes = set()
    for word in text.split(","):
        found = re.fullmatch(r"(\d{1,12}) ?(B|KiB|MiB|GiB)", word.strip())
        size = int(found[1]) * _UNITS[found[2]] if found else 0
        if not _SMALLEST <= size <= _LARGEST:
            raise UserError(
                f"--sizes: {word!r} is not a size from {in_units(_SMALLEST)} to {in_units(_LARGEST)}; "
                "write 4KiB,1MiB,64MiB"
            )
        sizes.add(size)
    return tuple(sorted(sizes))


def in_units(size: int) -> str:
    """`4 KiB`: in the largest unit that leaves a whole number."""
    unit = next(unit for unit in reversed(_UNITS) if size % _UNITS[unit] == 0)
    return f"{size // _UNITS[unit]} {unit}"


def measure(loaded: LoadedRecipe, settings: Settings, tell: Tell = lambda line: None) -> dict[str, Any]:
    """Both: the collectives, and what they cost each setting."""
    workers, cores = settings.workers, usable_cores()
    if not 2 <= workers <= cores:
        raise UserError(f"--workers: should be 2 or more, and at most the {cores} cores of this machine")
    place = _place(loaded.recipe, workers)
    recipes, refused = _recipes(loaded, settings)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as temporary:
        collectives = _measure_collectives(place, settings, Path(temporary))
        tell(f"collectives: {len(collectives)} measured")
        steps, failed = _measure_steps(place, recipes, settings, Path(temporary), tell)
    smallest = collectives[0]["bytes"]
    return {
        "recipe": loaded.recipe.name,
        "global_batch": loaded.recipe.train.global_batch,
        "workers": workers,
        "device": place.device,
        "backend": place.backend,
        "threads_per_worker": place.threads,
        "rounds": settings.rounds,
        "steps": settings.steps,
        "collectives": collectives,
        "latency_us": {row["collective"]: row["us"] for row in collectives if row["bytes"] == smallest},
        "settings": steps,
        "not_measured": {name: (refused | failed)[name] for name in settings.names if name in refused | failed},
    }


@dataclass(frozen=True)
class _Place:
    """Where workers compute and how they talk."""

    workers: int
    device: str
    backend: str
    threads: int
    environment: Mapping[str, str]

    def job(self, what: str, **fields: Any) -> dict[str, Any]:
        gpus = int(self.device == "cuda")
        return {"what": what, "backend": self.backend, "gpus_per_worker": gpus, "threads": self.threads, **fields}


def _place(recipe: Recipe, workers: int) -> _Place:
    """A GPU for each worker where there are so many, else the CPU for all."""
    import torch

    count, asked = torch.cuda.device_count(), recipe.cluster.gpus_per_worker
    if asked and count < workers:
        raise UserError(
            f"--workers: {workers} workers need a GPU each and PyTorch sees {count}; "
            "start fewer, or set cluster.gpus_per_worker=0"
        )
    device = "cuda" if asked != 0 and count >= workers else "cpu"
    backend = recipe.parallel.backend
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    if backend == "nccl" and device == "cpu":
        raise UserError(f"parallel.backend: nccl needs a GPU for each of {workers} workers; use auto or gloo")
    threads = recipe.cluster.threads_per_worker or max(1, usable_cores() // workers)
    # Some of PyTorch goes by whether there is a GPU, not by whether it is used.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return _Place(workers, device, backend, threads, nccl_environment(recipe.nccl) | hidden)


def _recipes(loaded: LoadedRecipe, settings: Settings) -> tuple[dict[str, LoadedRecipe], dict[str, str]]:
    """The recipe of each setting, and why there is none for some."""
    recipes, refused = {}, {}
    for name in settings.names:
        try:
            recipes[name] = recipe_for(loaded, name, settings.workers)
        except UserError as error:
            refused[name] = str(error).splitlines()[0]
    if not recipes:
        raise UserError(f"no setting can be measured; {_first(refused)}")
    return recipes, refused


def recipe_for(loaded: LoadedRecipe, name: str, workers: int) -> LoadedRecipe:
    """The recipe under one of the settings."""
    overrides: dict[str, Any] = _PLAIN | SETTINGS[name] | {"cluster.workers": workers, "cluster.min_workers": None}
    if times := overrides.pop(_ACCUMULATE, None):
        train = loaded.recipe.train
        given = train.micro_batch if isinstance(train.micro_batch, int) else None
        overrides["train.micro_batch"] = given or -(-train.global_batch // workers)
        overrides["train.global_batch"] = times * train.global_batch
    return load_recipe([loaded.tree()], overrides)


def _measure_collectives(place: _Place, settings: Settings, temporary: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    job = place.job("collectives", sizes=settings.sizes, rounds=settings.rounds)
    folder = temporary / "collectives"
    folder.mkdir()
    if failure := run_job(job, place.workers, folder, place.environment, records.append):
        raise RunError(f"the collectives could not be measured: {failure.message}")
    return sorted(records, key=lambda record: record["bytes"])


def _measure_steps(
    place: _Place, recipes: Mapping[str, LoadedRecipe], settings: Settings, temporary: Path, tell: Tell
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A record for each setting that could be measured, and why others could not.

    Settings of one strategy share their workers; those that one of them has broken are replaced.
    """
    records: list[dict[str, Any]] = []
    failed: dict[str, str] = {}

    def found(record: dict[str, Any]) -> None:
        records.append(record)
        tell(f"{record['name']}: {record['exposed_share']:.1%} of a step of {record['step_ms']:.0f} ms is exposed")

    for _, names in itertools.groupby(recipes, key=lambda name: recipes[name].recipe.parallel.strategy):
        left = list(names)
        while left:
            folder = temporary / left[0]
            folder.mkdir()
            job = place.job("steps", recipes={name: recipes[name].tree() for name in left}, steps=settings.steps)
            failure = run_job(job, place.workers, folder, place.environment, found)
            left = [name for name in left if name not in {record["name"] for record in records}]
            if failure and left:
                failed[left[0]] = failure.message
                tell(f"{left.pop(0)}: not measured: {failure.message}")
    if not records:
        raise RunError(f"no setting could be measured; {_first(failed)}")
    return records, failed


def _first(reasons: Mapping[str, str]) -> str:
    name, reason = next(iter(reasons.items()))
    return f"{name}: {reason}"


def by_size(records: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Records of collectives by size, then by name."""
    found: dict[int, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault(record["bytes"], {})[record["collective"]] = record
    return found


def collective_table(result: Mapping[str, Any]) -> list[list[str]]:
    """Bandwidths in GB/s, of the algorithm and of the bus, as rows of text, headed; the latency comes last."""
    latency = result["latency_us"]
    lines = [["GB/s", *itertools.chain.from_iterable((name, "bus") for name in latency)]]
    rows = by_size(result["collectives"])
    for size, records in rows.items():
        rates = [(records[name]["algorithm_gb_per_s"], records[name]["bus_gb_per_s"]) for name in latency]
        lines.append([in_units(size), *(f"{rate:.3f}" for rate in itertools.chain.from_iterable(rates))])
    times = itertools.chain.from_iterable((f"{us:.0f} us", "") for us in latency.values())
    return [*lines, [f"latency of {in_units(min(rows))}", *times]]


def step_table(result: Mapping[str, Any]) -> list[list[str]]:
    """What communication costs each setting as rows of text, headed."""
    lines = [["share of a step", "step", "communication", "exposed", "calls"]]
    for row in result["settings"]:
        shares = [f"{row[share]:.1%}" for share in ("communication_share", "exposed_share")]
        lines.append([row["name"], f"{row['step_ms']:.0f} ms", *shares, f"{row['calls']:.0f}"])
    return lines
