"""Real steps for the simulation: of workers that send nothing, and of workers that train together.

A worker that sends nothing is the only one of its group: DistributedDataParallel, FSDP2 and the packing of gradients
run as ever, with nobody to send to. As many of them as there will be workers compute at the same time, so that they
share the machine's cores as they will then. Runs on every worker.
"""

import contextlib
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shoal.bench.simulate_work import ROOT
from shoal.core.memory import keep_freed_memory
from shoal.core.process import Process
from shoal.models.blocks import repeated_blocks
from shoal.parallel.numerics import torch_settings
from shoal.recipe.load import check_tree
from shoal.train.build import Built, build
from shoal.train.hardware import for_workers

WARMUP = 3
"""Steps before any that count: memory is taken, and PowerSGD begins to pack."""
_OF_PHASE = {"h2d": 0, "forward": 0, "backward": 1, "comm": 1}


class Meeting:
    """Where workers that are alone in their groups wait for each other, before a step and never in it."""

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self._store, self._rank, self._count = store, rank, count
        self._number = 0

    def wait(self) -> None:
        """Until all are here."""
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        if self._count == 1:
            return [value]
        self._number += 1
        self._store.set(f"{self._number}/{self._rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._number}/{rank}")) for rank in range(self._count)]


def measure(
    process: Process, tree: dict[str, Any], steps: int, threads: int, meeting: Meeting | None
) -> dict[str, Any]:
    """Seconds of every step by phase, of each worker.

    Args:
        process: In a group of its own, or of all workers.
        tree: A recipe.
        steps: That count.
        threads: Of a worker, where the recipe does not say.
        meeting: Begins each step together; None for workers that train together, and wait for each other anyway.
    """
    with _built(process, tree, threads, WARMUP + steps) as (built, batches):
        step = _Stepping(built, batches, process.device)
        for _ in range(WARMUP):
            step.take()
        rows = []
        process.group.sum(0.0)
        for _ in range(steps):
            if meeting is not None:
                meeting.wait()
            rows.append(step.take())
    gc.collect()  # a unit refers to itself; the next one needs its memory
    everybody = (meeting or process.group).gather(rows)
    # Nobody is done before the slowest one is.
    slowest = [max(sum(row) for row in rows) for rows in zip(*everybody, strict=True)]
    phases = [statistics.median(row[number] for worker in everybody for row in worker) for number in range(3)]
    scale = statistics.median(slowest) / sum(phases)
    return {"step_s": statistics.median(slowest), "phases_s": [scale * phase for phase in phases]}


@contextlib.contextmanager
def _built(process: Process, tree: dict[str, Any], threads: int, num_steps: int) -> Iterator[tuple[Built, Any]]:
    recipe = for_workers(check_tree(tree).recipe, process)
    if process.device.type == "cpu":
        keep_freed_memory()
    threads = recipe.cluster.threads_per_worker or threads
    with torch_settings(precision=recipe.train.precision, threads=threads, device=process.device):
        built = build(recipe, process)
        with contextlib.closing(built.batches(0, num_steps)) as batches:
            yield built, batches


class _Stepping:
    """Takes steps, and times them by phase."""

    def __init__(self, built: Built, batches: Any, device: torch.device) -> None:
        self._built, self._batches, self._device = built, batches, device
        self._laps: list[tuple[int, float]] = []
        self.began = 0.0
        """When the latest step had its batch."""
        built.unit.lap = self._lap

    def _lap(self, phase: str) -> None:
        self._laps.append((_OF_PHASE[phase], self.now()))

    def now(self) -> float:
        """When the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def take(self) -> list[float]:
        """One step: seconds of the forward pass, the backward pass with what packs gradients, and the optimizer."""
        unit = self._built.unit
        batch = next(self._batches)
        self._laps.clear()
        before = self.began = self.now()
        seconds = [0.0, 0.0, 0.0]
        unit.forward_backward(batch)
        passes = self.now()
        unit.optimizer_step(self._built.recipe.optim.lr)
        seconds[2] = self.now() - passes
        for phase, at in self._laps:
            seconds[phase] += at - before
            before = at
        seconds[1] += passes - before
        return seconds


def measure_shape(process: Process, tree: dict[str, Any], steps: int, threads: int) -> dict[str, Any]:
    """A model's weights, and when in the passes of one process its blocks are computed and its gradients are there."""
    with _built(process, tree, threads, WARMUP + steps) as (built, batches):
        step = _Stepping(built, batches, process.device)
        for _ in range(WARMUP):
            step.take()
        with _Marks(built.unit.model, step.now) as marks:
            rows = []
            for _ in range(steps):
                marks.clear()
                forward, backward, _ = step.take()
                rows.append(marks.shares(step.began, forward, backward))
        weights, buffers = weights_of(built.unit.model), built.unit.model.buffers()
        learned = sum(buffer.numel() * buffer.element_size() for buffer in buffers if buffer.is_floating_point())
    forwards, readies = zip(*rows, strict=True)
    return {
        "weights": weights,
        "forward": [statistics.median(values) for values in zip(*forwards, strict=True)],
        "ready": [statistics.median(values) for values in zip(*readies, strict=True)],
        "buffers": learned,
    }


def weights_of(model: nn.Module) -> list[list[int]]:
    """(block, rows, columns) of every trained parameter, as the model registers them."""
    blocks = {
        parameter: number
        for number, (_, block) in enumerate(repeated_blocks(model))
        for parameter in block.parameters()
    }
    found = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            rows = parameter.shape[0] if parameter.ndim else 1
            found.append([blocks.get(parameter, ROOT), rows, max(1, parameter.numel() // max(1, rows))])
    return found


class _Marks:
    """When blocks begin and end their forward pass, and when gradients are there."""

    def __init__(self, model: nn.Module, now: Callable[[], float]) -> None:
        self._now = now
        self._blocks = [block for _, block in repeated_blocks(model)]
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._forward: list[float] = []
        self._ready: dict[int, float] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> "_Marks":
        for number, parameter in enumerate(self._parameters):
            watch: Any = parameter.register_post_accumulate_grad_hook
            self._hooks.append(watch(lambda _, number=number: self._is_ready(number)))
        for block in self._blocks:
            self._hooks.append(block.register_forward_pre_hook(lambda *_: self._forward.append(self._now())))
        if self._blocks:
            self._hooks.append(self._blocks[-1].register_forward_hook(lambda *_: self._forward.append(self._now())))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _is_ready(self, number: int) -> None:
        self._ready[number] = self._now()

    def clear(self) -> None:
        """A new step."""
        self._forward.clear()
        self._ready.clear()

    def shares(self, began: float, forward_s: float, backward_s: float) -> tuple[list[float], list[float]]:
        """Of the forward pass: before the first block, each block, what is after; and of the backward pass, how much is
        over when each gradient is there. Of one micro-batch."""
        count = len(self._blocks)
        points = [(at - began) / forward_s for at in self._forward[: count + 1]]
        is_in_order = len(points) == count + 1 and all(0 <= point <= 1 for point in points) and points == sorted(points)
        if count and is_in_order:
            lengths = [later - sooner for sooner, later in itertools.pairwise([0.0, *points, 1.0])]
        else:  # blocks that are not called one after the other, or none
            lengths = [0.0, *([1.0 / count] * count), 0.0] if count else [1.0, 0.0]
        end = began + forward_s + backward_s
        ready = [(backward_s - (end - at)) / backward_s for at in map(self._at, range(len(self._parameters)))]
        return lengths, [min(1.0, max(0.0, share)) for share in ready]

    def _at(self, number: int) -> float:
        """When a gradient was there; one that is not used is there when the others are."""
        return self._ready.get(number, max(self._ready.values()))
