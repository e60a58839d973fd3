"""How far a model scales on machines that are not here: steps of 1 to 1024 GPUs, simulated from a step of one.

Every GPU keeps its batch, however many there are. What one worker computes in a step is measured here under every
strategy, or given; what is sent and when follows from the model and the recipe; how long that takes, from a model of a
network.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bench.commands import Tell
from shoal.bench.simulate_check import divided
from shoal.bench.simulate_events import run
from shoal.bench.simulate_given import GivenStep, traced_shape
from shoal.bench.simulate_network import NETWORKS, Network
from shoal.bench.simulate_plan import STRATEGIES, Place, Rules, packing_s, tasks_of
from shoal.bench.simulate_recipes import batch_per_worker, one_micro_batch, recipe_for, rules_of
from shoal.bench.simulate_work import Phases, Shape, from_record
from shoal.bench.workers import run_job
from shoal.core.errors import RunError, UserError
from shoal.core.machine import usable_cores
from shoal.recipe.load import LoadedRecipe

DEFAULT_STRATEGIES = tuple(name for name in STRATEGIES if name != "ddp_fp16")


@dataclass(frozen=True)
class Settings:
    """What to simulate."""

    network: Network = NETWORKS["nvlink+ib"]
    gpus_per_node: int = 8
    max_gpus: int = 1024
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    given: GivenStep | None = None
    """None: a step is measured here."""
    steps: int = 10
    """Steps to measure."""


@dataclass(frozen=True)
class Known:
    """What one worker does."""

    single: Phases
    """In a process of its own."""
    own: Mapping[str, Phases]
    """Under each strategy, sending nothing."""
    shape: Shape
    source: str


def simulate(loaded: LoadedRecipe, settings: Settings, tell: Tell = lambda line: None) -> dict[str, Any]:
    """A step of every strategy on every number of GPUs."""
    recipe, rules = loaded.recipe, rules_of(loaded)
    counts = gpu_counts(settings.gpus_per_node, settings.max_gpus)
    known = _given(loaded, settings) if settings.given is not None else _measured(loaded, settings, tell)
    rows = [
        {"gpus": count, **{name: predict(name, known, rules, count, settings) for name in settings.strategies}}
        for count in counts
    ]
    network = vars(settings.network)
    return {
        "recipe": recipe.name,
        "batch_per_gpu": batch_per_worker(recipe),
        "micro_batches": rules.micro_batches,
        "step": known.source,
        "step_ms": 1e3 * known.single.total_s,
        "phases_ms": {name.removesuffix("_s"): 1e3 * value for name, value in vars(known.single).items()},
        "own_ms": {name: 1e3 * phases.total_s for name, phases in known.own.items()},
        "weights": known.shape.numel,
        "blocks": known.shape.num_blocks,
        "network": {name: None if value == float("inf") else value for name, value in network.items()},
        "gpus_per_node": settings.gpus_per_node,
        "strategies": list(settings.strategies),
        "rows": rows,
    }


def gpu_counts(per_node: int, most: int) -> list[int]:
    """1, 2, 4, ... of one machine, a whole machine, and its doubles."""
    counts = [count for count in (2**power for power in range(per_node.bit_length())) if count < per_node]
    while (following := 2 * counts[-1] if counts and counts[-1] >= per_node else per_node) <= most:
        counts.append(following)
    return [count for count in counts if count <= most]


def predict(strategy: str, known: Known, rules: Rules, gpus: int, settings: Settings) -> dict[str, float]:
    """Milliseconds, efficiency, and the share of the step that waits for the network. One GPU trains by itself."""
    single_s = known.single.total_s
    if gpus == 1:
        return {"step_ms": 1e3 * single_s, "efficiency": 1.0, "exposed_share": 0.0}
    place = Place(gpus, min(gpus, settings.gpus_per_node))
    own = divided(strategy, known.own[strategy], known.own.get("ddp", known.single), place)
    line = run(tasks_of(strategy, known.shape, own, rules, place, settings.network))
    return {
        "step_ms": 1e3 * line.total_s,
        "efficiency": single_s / line.total_s,
        "exposed_share": line.exposed_s / line.total_s,
    }


def _given(loaded: LoadedRecipe, settings: Settings) -> Known:
    """A step from elsewhere; packing takes what its bytes take through memory."""
    assert settings.given is not None
    phases, names = settings.given.phases, dict.fromkeys(["ddp", *settings.strategies])
    micro = one_micro_batch(loaded)
    shape = traced_shape(micro.recipe, micro.recipe.train.global_batch)
    own = {}
    for name in names:
        packing = packing_s(name, shape, settings.network.memory_gb_per_s)
        own[name] = Phases(phases.forward_s, phases.backward_s + packing, phases.optimizer_s)
    return Known(phases, own, shape, settings.given.source)


def _measured(loaded: LoadedRecipe, settings: Settings, tell: Tell) -> Known:
    """A step that is measured here, on a GPU where there is one."""
    from shoal.bench.results import machine

    place = _device(loaded)
    names = dict.fromkeys(["single", "ddp", *("fsdp" if name == "hsdp" else name for name in settings.strategies)])
    recipes = {name: recipe_for(loaded, name, 1).tree() for name in names}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as temporary:
        found = _job("alone", place, Path(temporary), recipes=recipes, steps=settings.steps)
        tree = one_micro_batch(loaded).tree()
        (record,) = _job("shape", place, Path(temporary), recipe=tree, steps=settings.steps)
    phases = {each["name"]: Phases.of(each["phases_s"]) for each in found}
    for name, each in phases.items():
        tell(f"{name}: {1e3 * each.total_s:.1f} ms of computing")
    own = {name: phases["fsdp" if name == "hsdp" else name] for name in dict.fromkeys(["ddp", *settings.strategies])}
    device = machine()["device"] if place["gpus_per_worker"] else f"CPU, {place['threads']} threads"
    return Known(phases["single"], own, from_record(record), f"measured here, on {device}")


def _device(loaded: LoadedRecipe) -> dict[str, Any]:
    """What a worker computes on."""
    from shoal.core.process import choose_device

    cluster = loaded.recipe.cluster
    gpus = int(choose_device(cluster.gpus_per_worker).type == "cuda")
    threads = cluster.threads_per_worker or usable_cores()
    return {"gpus_per_worker": gpus, "threads": threads, "backend": "nccl" if gpus else "gloo"}


def _job(what: str, place: Mapping[str, Any], temporary: Path, **fields: Any) -> list[dict[str, Any]]:
    folder = temporary / what
    folder.mkdir()
    records: list[dict[str, Any]] = []
    hidden = {} if place["gpus_per_worker"] else {"CUDA_VISIBLE_DEVICES": ""}
    if failure := run_job({"what": what, **place, **fields}, 1, folder, hidden, records.append):
        if failure.is_refused:
            raise UserError(failure.message)
        raise RunError(f"a step could not be measured: {failure.message}")
    return records


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """By the number of GPUs: step, efficiency, and what of the step is waiting; as rows of text, headed."""
    lines = [["GPUs", *(word for name in result["strategies"] for word in (name, "eff.", "exposed"))]]
    for row in result["rows"]:
        cells = [row[name] for name in result["strategies"]]
        words = [(f"{c['step_ms']:.1f} ms", f"{c['efficiency']:.1%}", f"{c['exposed_share']:.1%}") for c in cells]
        lines.append([str(row["gpus"]), *(word for cell in words for word in cell)])
    return lines


def notes(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the table stands on."""
    phases = ", ".join(f"{name} {value:.1f} ms" for name, value in result["phases_ms"].items())
    return [
        ("step", f"{result['step_ms']:.1f} ms ({phases}); {result['step']}"),
        ("model", f"{result['recipe']}: {result['weights']:,} weights, {result['blocks']} blocks"),
        ("network", f"{result['network']['name']}, {result['gpus_per_node']} GPUs a machine"),
    ]


def efficiencies(result: Mapping[str, Any], strategy: str) -> Sequence[float]:
    """Of one strategy, by the number of GPUs."""
    return [row[strategy]["efficiency"] for row in result["rows"]]
