"""Whether data keeps up with training: the same steps on images that are read and on one batch that is there."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal.bench.commands import Tell
from shoal.bench.data_files import NUM_CLASSES, make_images
from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.machine import usable_cores
from shoal.core.process import Process, choose_device
from shoal.data.shards.make import Request, make_shards
from shoal.parallel.numerics import torch_settings
from shoal.recipe.load import load_recipe
from shoal.train.build import Built, build

_WARMUP = 5
_SHARD_BYTES = 64 << 20
ENOUGH = 0.95
"""Of the rate of a batch that is there."""


@dataclass(frozen=True)
class TrainSettings:
    """What is trained on."""

    samples: int = 8192
    steps: int = 30
    rounds: int = 3
    batch: int = 256
    workers: int | None = None
    """Loader processes; None finds out how many."""
    folder: Path | None = None
    model: str = "resnet50"
    precision: str = "bf16"
    size: int = 224


def measure_training(settings: TrainSettings, tell: Tell = lambda line: None) -> dict[str, Any]:
    """Samples a second of training on a batch that stays on the device, on an image folder and on shards, in turns; and
    of reading alone."""
    with contextlib.ExitStack() as stack:
        folder = settings.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        tell(f"making {settings.samples:,} images")
        source = folder / f"images-{settings.samples}"
        if not source.is_dir():
            make_images(source, settings.samples)
            make_shards(Request(source, str(folder / f"shards-{settings.samples}"), _SHARD_BYTES), lambda shard: None)
        process = Process(0, 1, choose_device(None))
        stack.enter_context(torch_settings(precision=settings.precision, device=process.device))
        built = {
            name: build(load_recipe([_recipe(settings, where)]).recipe, process)
            for name, where in (("folder", source), ("shards", folder / f"shards-{settings.samples}"))
        }
        rates: dict[str, list[float]] = {name: [] for name in ("synthetic", *built)}
        reading = {name: _reading_rate(one, settings) for name, one in built.items()}
        for number in range(settings.rounds):
            for name, rate in rates.items():
                rate.append(_training_rate(built.get(name), built["folder"], settings))
                tell(f"round {number + 1} of {settings.rounds}, {name}: {rate[-1]:,.0f} samples/s")
    ratios = {name: _ratios(rates[name], rates["synthetic"]) for name in built}
    return {
        "device": torch.cuda.get_device_name() if process.device.type == "cuda" else "cpu",
        "cores": usable_cores(),
        "settings": {name: str(value) for name, value in vars(settings).items()},
        "samples_per_s": {name: statistics.median(rate) for name, rate in rates.items()},
        "rounds": rates,
        "reading_samples_per_s": reading,
        "loader_processes": {name: one.feeding.train.statistics.workers for name, one in built.items()},
        "ratios": {name: statistics.median(ratio) for name, ratio in ratios.items()},
    }


def _ratios(rates: list[float], others: list[float]) -> list[float]:
    return [a / b for a, b in zip(rates, others, strict=True)]


def _recipe(settings: TrainSettings, folder: Path) -> dict[str, Any]:
    workers = settings.workers if settings.workers is not None else "auto"
    return {
        "name": "data-train",
        "task": "image_classification",
        "model": {"name": settings.model},
        "data": {"name": "image_folder", "dir": str(folder), "size": settings.size, "workers": workers},
        "optim": {"name": "sgd", "lr": 1e-3, "momentum": 0.9},
        "train": {"steps": 10**6, "global_batch": settings.batch, "precision": settings.precision},
    }


def _training_rate(built: Built | None, any_built: Built, settings: TrainSettings) -> float:
    """Of the steps after a warm-up, which is as long as it takes to find the number of readers."""
    unit = (built or any_built).unit
    warmup = _WARMUP if built is None else 6 * _WARMUP
    total = warmup + settings.steps
    steps = _synthetic(settings, unit.device, total) if built is None else built.batches(0, total)
    began = 0.0
    with contextlib.closing(steps):
        for number, step in enumerate(steps):
            if number == warmup:
                _wait_for(unit.device)
                began = time.perf_counter()
            unit.forward_backward(step)
            unit.optimizer_step(1e-3)
        _wait_for(unit.device)
        return settings.steps * settings.batch / (time.perf_counter() - began)


def _synthetic(settings: TrainSettings, device: torch.device, total: int) -> Generator[StepBatch]:
    images = torch.randn(settings.batch, 3, settings.size, settings.size, device=device)
    labels = torch.randint(0, NUM_CLASSES, (settings.batch,), device=device)
    for _ in range(total):
        yield StepBatch([MicroBatch((images, labels), settings.batch)], settings.batch)


def _reading_rate(built: Built, settings: TrainSettings) -> float:
    """By as many processes as there may be, and nothing else going on."""
    loading = replace(built.feeding.train, workers=settings.workers or built.feeding.train.most_workers)
    alone = replace(built, feeding=replace(built.feeding, train=loading))
    total = _WARMUP + settings.steps
    began = 0.0
    with contextlib.closing(alone.batches(0, total)) as steps:
        for number, _ in enumerate(steps):
            if number == _WARMUP:
                began = time.perf_counter()
        _wait_for(built.unit.device)
        return (settings.steps - 1) * settings.batch / (time.perf_counter() - began)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def verdict(result: dict[str, Any]) -> str:
    """Whether the data keeps up, and if not, what bounds it."""
    worst = min(result["ratios"], key=lambda name: result["ratios"][name])
    ratio = result["ratios"][worst]
    if ratio >= ENOUGH:
        return f"the data keeps up: {ratio:.1%} of the rate of a batch that is there ({worst})"
    reading, needed = result["reading_samples_per_s"][worst], result["samples_per_s"]["synthetic"]
    cores, processes = result["cores"], result["loader_processes"][worst]
    if reading < needed:
        return (
            f"{worst}: {ratio:.1%}, bounded by decoding: {cores} cores read {reading:,.0f} samples/s alone, and the "
            f"device takes {needed:,.0f}; give it more cores, or smaller images (shoal data shard --resize)"
        )
    return (
        f"{worst}: {ratio:.1%}, although {cores} cores read {reading:,.0f} samples/s alone and {needed:,.0f} are "
        f"needed: {processes} processes read beside the training; the training process itself is what waits"
    )
