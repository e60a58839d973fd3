"""How fast batches come: Shoal's loader against torch's DataLoader on the same samples, in turns."""

import statistics
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from shoal.core.errors import UserError
from shoal.data.build import build_datasets
from shoal.data.dataset import reads_batches
from shoal.data.loader import Loading, train_batches
from shoal.data.order import Order
from shoal.parallel.numerics import torch_settings
from shoal.recipe.schema import Recipe


def measure(recipe: Recipe, rounds: int, max_samples: int = 60_000) -> dict[str, Any]:
    """Samples a second of both over one epoch.

    DataLoader gets the samples already decoded and normalised as tensors, which is the fastest it can be given; what is
    compared is how they become shuffled batches.
    """
    if recipe.data is None:
        raise UserError("data: is required: name the data to measure")
    dataset = build_datasets(recipe.data, recipe.train.seed).train
    if not reads_batches(dataset):
        raise UserError(f"data.name: {recipe.data.name} is read item by item, so there is nothing to compare")
    size = min(len(dataset), max_samples)
    batch = recipe.train.global_batch
    # What a run does by itself with data in memory: no processes.
    loading = Loading(workers=0 if recipe.data.workers == "auto" else recipe.data.workers)
    order = Order(size, batch, recipe.train.seed)
    ready = TensorDataset(*dataset.batch(np.arange(size), 0))
    loader = DataLoader(ready, batch_size=batch, shuffle=True, num_workers=0)

    def ours() -> int:
        steps = train_batches(dataset, order, 0, order.steps_per_epoch, micro_batch=batch, loading=loading)
        return sum(step.num_samples for step in steps)

    def theirs() -> int:
        return sum(len(item[0]) for item in loader)

    rates: dict[str, list[float]] = {"shoal": [], "dataloader": []}
    with torch_settings(threads=recipe.cluster.threads_per_worker):
        for _ in range(rounds):
            for name, read in (("shoal", ours), ("dataloader", theirs)):
                started = time.perf_counter()
                count = read()
                rates[name].append(count / (time.perf_counter() - started))
    ratios = [a / b for a, b in zip(rates["shoal"], rates["dataloader"], strict=True)]
    return {
        "recipe": recipe.name,
        "samples": size,
        "global_batch": batch,
        "threads": torch.get_num_threads(),
        "shoal_samples_per_s": statistics.median(rates["shoal"]),
        "dataloader_samples_per_s": statistics.median(rates["dataloader"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }
