"""What is told when a run starts."""

import os
import socket
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shoal.core.kernels import can_compile_kernels
from shoal.core.machine import cpu_model, usable_cores
from shoal.core.process import Process
from shoal.core.version import VERSION
from shoal.observe.records import Observer
from shoal.observe.run_folder import RunFolder
from shoal.parallel.build import choose_strategy
from shoal.parallel.degrees import find_degrees, in_words
from shoal.recipe.automatic import GPU, with_numerics
from shoal.recipe.parallel_checks import idle_settings
from shoal.recipe.schema import Recipe
from shoal.train.build import Built
from shoal.train.request import RunRequest
from shoal.train.restore import Restored
from shoal.train.training import Training


def announce(
    folder: RunFolder,
    request: RunRequest,
    built: Built,
    run: Training,
    observer: Observer,
    restored: Restored,
    workers: list[dict[str, Any]],
) -> None:
    """Say what starts, before it does."""
    folder.write_recipe(request.loaded.to_yaml())
    for name, fields in restored.told:
        observer.event(name, request.hidden(fields))
    if (found := restored.checkpoint) is not None:
        observer.event("resume", {"step": found.step, "path": str(found.path)})
    elif request.resume:
        observer.event("warning", {"message": "the run has no checkpoint yet, so it begins anew"})
    division = _division(run.recipe, workers)
    observer.event("start", _start_facts(request, built, run, division, len(workers)))
    observer.event("workers", {"workers": workers})
    own = request.loaded.recipe
    slow = _why_slow(own, run)
    for message in [*built.warnings, *_odd_sizes(run, built, division), *idle_settings(own.parallel), *slow]:
        observer.event("warning", {"message": message})


@dataclass(frozen=True)
class _Division:
    """How a step is divided."""

    strategy: str
    """In words, with the sizes of its groups."""
    stages: int
    micro_batch: int
    micro_batches: int


def _division(recipe: Recipe, workers: list[dict[str, Any]]) -> _Division:
    parallel, world_size = recipe.parallel, len(workers)
    of_one_node = next(iter(Counter(worker["node"] for worker in workers).values()))
    strategy = choose_strategy(parallel, world_size)
    degrees = find_degrees(parallel, strategy, world_size, of_one_node)
    micro_batch = recipe.micro_batch(degrees.data)
    micro_batches = -(-recipe.train.global_batch // (degrees.data * micro_batch))
    return _Division(in_words(parallel, strategy, degrees), degrees.stages, micro_batch, micro_batches)


def _odd_sizes(run: Training, built: Built, division: _Division) -> list[str]:
    """What works but is seldom meant."""
    optim, train, found = run.recipe.optim, run.recipe.train, []
    if optim.warmup_steps >= run.plan.num_steps:
        found.append(f"optim.warmup_steps: {optim.warmup_steps} is not less than the run's {run.plan.num_steps} steps")
    if train.global_batch > built.order.num_samples:
        found.append(f"train.global_batch: {train.global_batch} is more than the {built.order.num_samples} samples")
    if division.micro_batches < division.stages:
        count = "1 micro-batch" if division.micro_batches == 1 else f"{division.micro_batches} micro-batches"
        found.append(
            f"train.micro_batch: {division.micro_batch} makes {count} a step, fewer than the {division.stages} stages "
            "of the pipeline, which wait for each other; set a smaller one"
        )
    return found


def _why_slow(own: Recipe, run: Training) -> list[str]:
    """What the machine lacks to be as fast as it could be."""
    would_compile = with_numerics(own, GPU).train.compile is not False
    if run.unit.device.type != "cuda" or not would_compile or can_compile_kernels():
        return []
    return [
        "train.compile: this machine has no C compiler, or not Python's headers, so steps are slower than they could "
        "be; install them (apt-get install gcc python3-dev), or set train.compile=false"
    ]


def _start_facts(
    request: RunRequest, built: Built, run: Training, division: _Division, world_size: int
) -> dict[str, Any]:
    return {
        "run": request.run_dir.name,
        "asked": request.started,
        "clock": run.clock.started_at,
        "startup_s": request.marks,
        "launch": request.launch,
        "versions": {"shoal": VERSION, "torch": torch.__version__},
        "world_size": world_size,
        "strategy": division.strategy,
        "numerics": _numerics(run.recipe),
        "parameters": built.num_parameters,
        "device": str(run.unit.device),
        "train_samples": len(built.datasets.train),
        "data_spec": asdict(built.datasets.spec),
        "num_steps": run.plan.num_steps,
        "step": run.state.step,
        "global_batch": run.recipe.train.global_batch,
        "micro_batch": division.micro_batch,
        "accumulation": division.micro_batches,
    }


def _numerics(recipe: Recipe) -> str:
    """What a recipe computes with, also where it leaves that to us; `bf16, compiled, channels last`."""
    train = recipe.train
    words = {"compiled": train.compile is True, "channels last": train.channels_last is True, "fp8": train.fp8}
    words["CUDA graphs"] = train.cuda_graphs is not False
    return ", ".join([train.precision, *(word for word, is_so in words.items() if is_so)])


def worker_facts(process: Process) -> dict[str, Any]:
    """Who and where a worker is."""
    device = str(process.device)
    name = torch.cuda.get_device_name(process.device) if process.device.type == "cuda" else "cpu"
    return {
        "rank": process.rank,
        "node": process.node,
        "pid": os.getpid(),
        "agent_pid": process.agent_pid,
        "host": socket.gethostname(),
        "address": process.address,
        "device": device,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
    }
