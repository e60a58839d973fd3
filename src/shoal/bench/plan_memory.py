"""The memory that a worker takes for a few real steps: what `shoal plan --check` measures."""

import ctypes
import gc
import importlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.core.objective import Objective
from shoal.core.parts import is_distributed
from shoal.core.process import Process
from shoal.parallel.build import choose_strategy
from shoal.parallel.numerics import torch_settings
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.unit import StepSettings, TrainUnit
from shoal.recipe.load import check_tree
from shoal.recipe.parallel_checks import unused_sections
from shoal.recipe.schema import Recipe
from shoal.tasks.build import build_task
from shoal.train.build import build, datasets_of
from shoal.train.hardware import for_workers


class HostMemory:
    """What this process has taken from the kernel for data of its own, over a baseline.

    Pages of files are left out: code is loaded when it is first used. The C library must give back what is freed
    (`GIVES_BACK`), or this would be what was once taken.
    """

    def __init__(self, with_pinned: bool = False) -> None:
        """`with_pinned`: with what a GPU can reach by itself, which the kernel counts as shared."""
        self._with_pinned = with_pinned
        self.before = 0
        """Bytes that are not the model's: the interpreter and its libraries."""
        self.before = self.now()

    def now(self) -> int:
        """Bytes at this moment."""
        told = _status()
        return told["RssAnon"] + self._with_pinned * told["RssShmem"] - self.before

    def reset_peak(self) -> None:
        """From here on, `peak` is about what comes."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak(self) -> int:
        """Most bytes since `reset_peak`."""
        told = _status()
        shared = 0 if self._with_pinned else told["RssShmem"]
        return told["VmHWM"] - told["RssFile"] - shared - self.before


class GpuMemory:
    """What PyTorch has given out of the GPU's memory, by its own account."""

    before = 0

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


def measure(process: Process, tree: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Take steps of a recipe, as one of its workers; what memory they took, in bytes, and how long."""
    recipe = for_workers(check_tree(tree).recipe, process)
    cores = len(os.sched_getaffinity(0))
    settings = torch_settings(
        precision=recipe.train.precision,
        deterministic=recipe.train.deterministic,
        threads=recipe.cluster.threads_per_worker or max(1, cores // process.world_size),
        device=process.device,
        gpu_allocator=recipe.cluster.gpu_allocator,
    )
    with settings:
        return _take_steps(recipe, process, num_steps)


def _take_steps(recipe: Recipe, process: Process, num_steps: int) -> dict[str, Any]:
    """Build what the recipe describes, take steps, and tell what memory they took."""
    _warm_up(process, choose_strategy(recipe.parallel, process.world_size))
    on_gpu = process.device.type == "cuda"
    memory = GpuMemory(process.device) if on_gpu else HostMemory()
    # Not of DeepSpeed, whose figure nobody has held beside a measured one.
    offloads = recipe.parallel.fsdp.cpu_offload and "fsdp" not in unused_sections(recipe.parallel)
    host = HostMemory(with_pinned=True) if on_gpu and offloads else None
    data = _in_memory(recipe, host or memory)
    memory.reset_peak()
    built = build(recipe, process)
    _give_back()
    found: dict[str, Any] = {
        "data": 0 if on_gpu else data,
        "start": memory.peak(),
        "built": memory.now(),
        "steps": [],
        "seconds": [],
        "gradients": 0,
    }
    if host is not None:
        host.reset_peak()
    for batch in built.batches(0, num_steps):
        memory.reset_peak()
        started = time.perf_counter()
        built.unit.forward_backward(batch)
        found["gradients"] = _gradients(built.unit, process.device)
        built.unit.optimizer_step(1e-6)
        if on_gpu:
            torch.cuda.synchronize(process.device)
        found["seconds"].append(time.perf_counter() - started)
        found["steps"].append(memory.peak())
    _give_back()
    model, optimizer = built.unit.model, getattr(built.unit, "optimizer", None)
    states = optimizer.state.values() if optimizer is not None else ()
    moments = [value for state in states for value in state.values() if torch.is_tensor(value)]
    found["weights"] = sum(_held(parameter, process.device) for parameter in model.parameters())
    found["optimizer"] = sum(_held(value, process.device) for value in moments)
    if host is not None:
        found["host"] = host.peak() - data
    return found | {"between": memory.now(), "before": memory.before, "device": process.device.type}


def _in_memory(recipe: Recipe, memory: "HostMemory | GpuMemory") -> int:
    """Bytes of the dataset, which is not the step's."""
    before = memory.now()
    datasets = datasets_of(build_task(recipe.task), recipe)
    size = memory.now() - before
    del datasets
    _give_back()
    return size


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


def _gradients(unit: TrainUnit, device: torch.device) -> int:
    return sum(_held(parameter.grad, device) for parameter in unit.model.parameters() if parameter.grad is not None)


def _held(tensor: Any, device: torch.device) -> int:
    """Bytes that this worker holds of a tensor on its device; of what is offloaded, none."""
    tensor = tensor.to_local() if is_distributed(tensor) else tensor
    return tensor.numel() * tensor.element_size() if tensor.device.type == device.type else 0


def _status() -> dict[str, int]:
    """What the kernel says of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    told = dict(line.split(":", 1) for line in lines)
    return {name: 1024 * int(told[name].split()[0]) for name in ("VmHWM", "RssAnon", "RssFile", "RssShmem")}
