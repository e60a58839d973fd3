"""What is told when a run starts."""

import os
import socket
from typing import Any

import torch

from shoal.core.process import Process
from shoal.observe.records import Observer
from shoal.observe.run_folder import RunFolder
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
    observer.event("start", _start_facts(request, built, run, len(workers)))
    observer.event("workers", {"workers": workers})
    for message in [*built.warnings, *_odd_sizes(run, built)]:
        observer.event("warning", {"message": message})


def _odd_sizes(run: Training, built: Built) -> list[str]:
    """What works but is seldom meant."""
    optim, train, found = run.recipe.optim, run.recipe.train, []
    if optim.warmup_steps >= run.plan.num_steps:
        found.append(f"optim.warmup_steps: {optim.warmup_steps} is not less than the run's {run.plan.num_steps} steps")
    if train.global_batch > built.order.num_samples:
        found.append(f"train.global_batch: {train.global_batch} is more than the {built.order.num_samples} samples")
    return found


def _start_facts(request: RunRequest, built: Built, run: Training, world_size: int) -> dict[str, Any]:
    return {
        "run": request.run_dir.name,
        "startup_s": request.marks,
        "world_size": world_size,
        "parameters": built.num_parameters,
        "device": str(run.unit.device),
        "train_samples": len(built.datasets.train),
        "num_steps": run.plan.num_steps,
        "step": run.state.step,
        "global_batch": run.recipe.train.global_batch,
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
