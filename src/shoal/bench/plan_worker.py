"""One worker of `shoal plan --check`: takes a few real steps and writes down what memory they took."""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.bench.comm_workers import Failure, tell_failure
from shoal.core.batch import StepBatch
from shoal.core.errors import UserError
from shoal.core.group import Meeting, by_network, joined
from shoal.core.objective import Objective
from shoal.core.parts import is_distributed
from shoal.core.process import Process, choose_device
from shoal.data.loader import train_batches
from shoal.launch.crew import LOOPBACK
from shoal.parallel.build import choose_strategy
from shoal.parallel.numerics import torch_settings
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.unit import StepSettings, TrainUnit
from shoal.recipe.load import check_tree
from shoal.recipe.schema import Recipe
from shoal.tasks.build import build_task
from shoal.train.build import Built, _datasets, build

_PR_SET_PDEATHSIG = 1
_TIMEOUT_S = 600.0


class HostMemory:
    """What this process has taken from the kernel for data of its own, over a baseline.

    Pages of files are left out: code is loaded when it is first used. The C library must give back what is freed
    (`GIVES_BACK`), or this would be what was once taken.
    """

    def __init__(self) -> None:
        self._base = 0
        self._base = self.now()

    def now(self) -> int:
        """Bytes at this moment."""
        return _status()["RssAnon"] - self._base

    def reset_peak(self) -> None:
        """From here on, `peak` is about what comes."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak(self) -> int:
        """Most bytes since `reset_peak`."""
        told = _status()
        return told["VmHWM"] - told["RssFile"] - told["RssShmem"] - self._base


class GpuMemory:
    """What PyTorch has given out of the GPU's memory, by its own account."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        """Bytes at this moment."""
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> None:
        """From here on, `peak` is about what comes."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Most bytes since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)


def main() -> int:
    """Take the steps that the job in the folder `sys.argv[1]` asks for, as rank `sys.argv[2]`; the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for whoever measures
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    if os.getppid() != job["parent"]:  # it has gone before it could take this one along
        return 1
    sys.path[:0] = [path for path in job["paths"] if path not in sys.path]
    try:
        found = _do(job, rank)
    except BaseException as error:  # noqa: BLE001 - told in full
        traceback.print_exc()
        words = str(error).strip().splitlines()[:1] or [type(error).__name__]
        tell_failure(folder, rank, Failure(words[0], isinstance(error, UserError), is_consequence=by_network(error)))
        return 1
    (folder / f"found-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


def _do(job: dict[str, Any], rank: int) -> dict[str, Any]:
    recipe, world_size = check_tree(job["recipe"]).recipe, job["world_size"]
    device = choose_device(recipe.cluster.gpus_per_worker, rank)
    threads = recipe.cluster.threads_per_worker or max(1, len(os.sched_getaffinity(0)) // world_size)
    settings = torch_settings(
        precision=recipe.train.precision,
        deterministic=recipe.train.deterministic,
        threads=threads,
        device=device,
        gpu_allocator=recipe.cluster.gpu_allocator,
    )
    meeting = Meeting(rank, world_size, LOOPBACK, job["port"], _TIMEOUT_S, hosted=True)
    with joined(meeting, device, recipe.parallel.backend) as group, settings:
        process = Process(
            rank, world_size, device, group, local_rank=rank, local_world_size=world_size, node="here", address=LOOPBACK
        )
        found = take_steps(recipe, process, job["steps"])
        group.sum(0.0)  # nobody leaves while another still needs it
    return found


def take_steps(recipe: Recipe, process: Process, num_steps: int) -> dict[str, Any]:
    """Build what the recipe describes, take steps, and tell what memory they took."""
    _warm_up(process, choose_strategy(recipe.parallel, process.world_size))
    memory = GpuMemory(process.device) if process.device.type == "cuda" else HostMemory()
    data = _in_memory(recipe, memory)
    memory.reset_peak()
    built = build(recipe, process)
    _give_back()
    found: dict[str, Any] = {"data": data, "start": memory.peak(), "built": memory.now(), "steps": [], "gradients": 0}
    for batch in _batches(recipe, built, num_steps):
        memory.reset_peak()
        built.unit.forward_backward(batch)
        found["gradients"] = _gradients(built.unit)
        built.unit.optimizer_step(1e-6)
        found["steps"].append(memory.peak())
    _give_back()
    model, optimizer = built.unit.model, getattr(built.unit, "optimizer", None)
    found["weights"] = sum(_held(parameter) for parameter in model.parameters())
    states = optimizer.state.values() if optimizer is not None else ()
    found["optimizer"] = sum(_held(value) for state in states for value in state.values() if torch.is_tensor(value))
    return found | {"between": memory.now(), "device": process.device.type}


def _in_memory(recipe: Recipe, memory: "HostMemory | GpuMemory") -> int:
    """Bytes of the dataset, which is not the step's."""
    before = memory.now()
    datasets = _datasets(build_task(recipe.task), recipe)
    size = memory.now() - before
    del datasets
    _give_back()
    return size


def _batches(recipe: Recipe, built: Built, num_steps: int) -> Iterator[StepBatch]:
    unit = built.unit
    return train_batches(
        built.datasets.train,
        built.order,
        0,
        num_steps,
        rank=unit.data_rank,
        world_size=unit.data_size,
        micro_batch=recipe.micro_batch(unit.data_size),
        pin_memory=unit.device.type == "cuda",
    )


def _warm_up(process: Process, strategy: str) -> None:
    """Load what is loaded at first use, which is not the model's."""
    importlib.import_module(f"shoal.parallel.{strategy}")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 8)).to(process.device)
    loss = model(torch.ones(2, 3, 8, 8, device=process.device)).sum()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss.backward()
    optimizer.step()
    if strategy == "deepspeed":  # which loads most of itself when an engine is made
        from shoal.parallel.deepspeed import DeepSpeedUnit

        objective = Objective(loss=lambda model, batch: model(batch).sum(), metrics=lambda model, batch, count: {})
        DeepSpeedUnit(nn.Linear(8, 8), objective, StepSettings(OptimSection()), process, ParallelSection())
    del model, loss, optimizer
    _give_back()


def _give_back() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _gradients(unit: TrainUnit) -> int:
    return sum(_held(parameter.grad) for parameter in unit.model.parameters() if parameter.grad is not None)


def _held(tensor: Any) -> int:
    """Bytes that this worker holds of a tensor."""
    tensor = tensor.to_local() if is_distributed(tensor) else tensor
    return 0 if tensor.is_meta else tensor.numel() * tensor.element_size()


def _status() -> dict[str, int]:
    """What the kernel says of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    told = dict(line.split(":", 1) for line in lines)
    return {name: 1024 * int(told[name].split()[0]) for name in ("VmHWM", "RssAnon", "RssFile", "RssShmem")}


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # PyTorch aborts now and then when a process that used Gloo winds up
