"""What is told when a run starts."""

import os
import socket
from collections import Counter
from typing import Any

import torch

from shoal.core.process import Process
from shoal.observe.records import Observer
from shoal.observe.run_folder import RunFolder
from shoal.parallel.build import choose_strategy
from shoal.parallel.degrees import Degrees, find_degrees, in_words
from shoal.recipe.parallel_checks import idle_settings
from shoal.train.build import Built
from shoal.train.loop import Training
from shoal.train.request import RunRequest
from shoal.train.restore import Restored


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
    observer.event("start", _start_facts(request, built, run, workers))
    observer.event("workers", {"workers": workers})
    own = request.loaded.recipe
    for message in [*built.warnings, *_odd_sizes(run, built, workers), *idle_settings(own.parallel)]:
        observer.event("warning", {"message": message})


def _odd_sizes(run: Training, built: Built, workers: list[dict[str, Any]]) -> list[str]:
    """What works but is seldom meant."""
    optim, train, found = run.recipe.optim, run.recipe.train, []
    if optim.warmup_steps >= run.plan.num_steps:
        found.append(f"optim.warmup_steps: {optim.warmup_steps} is not less than the run's {run.plan.num_steps} steps")
    if train.global_batch > built.order.num_samples:
        found.append(f"train.global_batch: {train.global_batch} is more than the {built.order.num_samples} samples")
    degrees, micro_batch = _division(run, workers)
    flowing = -(-train.global_batch // (degrees.data * micro_batch))
    if flowing < degrees.stages:
        count = "1 micro-batch" if flowing == 1 else f"{flowing} micro-batches"
        found.append(
            f"train.micro_batch: {micro_batch} makes {count} a step, fewer than the {degrees.stages} stages of the "
            "pipeline, which wait for each other; set a smaller one"
        )
    return found


def _division(run: Training, workers: list[dict[str, Any]]) -> tuple[Degrees, int]:
    """How the workers are divided, and samples of a micro-batch."""
    parallel = run.recipe.parallel
    on_nodes = Counter(worker["node"] for worker in workers)
    strategy = choose_strategy(parallel, len(workers))
    degrees = find_degrees(parallel, strategy, len(workers), next(iter(on_nodes.values())))
    return degrees, run.recipe.micro_batch(degrees.data)


def _start_facts(request: RunRequest, built: Built, run: Training, workers: list[dict[str, Any]]) -> dict[str, Any]:
    degrees, micro_batch = _division(run, workers)
    parallel, world_size = run.recipe.parallel, len(workers)
    return {
        "run": request.run_dir.name,
        "startup_s": request.marks,
        "world_size": world_size,
        "strategy": in_words(parallel, choose_strategy(parallel, world_size), degrees),
        "parameters": built.num_parameters,
        "device": str(run.unit.device),
        "train_samples": len(built.datasets.train),
        "num_steps": run.plan.num_steps,
        "step": run.state.step,
        "global_batch": run.recipe.train.global_batch,
        "micro_batch": micro_batch,
        "accumulation": -(-run.recipe.train.global_batch // (degrees.data * micro_batch)),
    }


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
    }
