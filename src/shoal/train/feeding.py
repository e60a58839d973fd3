"""How the data of a run reaches its workers: which loader, in which order, by how many processes."""

from dataclasses import dataclass
from typing import Any

import torch

from shoal.core.errors import UserError
from shoal.core.machine import usable_cores
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.data.choose import Kind, Streaming, choose_loader, make_order
from shoal.data.dataset import Datasets, MemoryDataset
from shoal.data.iterable import IterableRows
from shoal.data.loader import Loading
from shoal.data.order import Order
from shoal.data.processes import open_reader
from shoal.data.section import TaskData
from shoal.models.section import Lstm
from shoal.recipe.schema import Recipe
from shoal.train.plan import make_plan
from shoal.train.ray_feed import RayFeed


@dataclass(frozen=True)
class Feeding:
    """What reads the two parts of a dataset."""

    datasets: Datasets
    kind: Kind
    order: Order
    train: Loading
    val: Loading


def plan_feeding(
    recipe: Recipe, datasets: Datasets, objective: Objective, process: Process, data_size: int = 1
) -> Feeding:
    """Decide how the data is read, by `data_size` workers that each have a share of it; which samples a step has
    follows from the recipe alone. Every worker must call this."""
    section: Any = recipe.data or TaskData()
    device = process.device
    kind = choose_loader(section.loader, datasets.train)
    resident = getattr(section, "resident", "auto")
    # A task's count() is given what is on the host still.
    may_reside = resident == "auto" and kind == "memory" and objective.count is None
    if resident is True or (may_reside and _may_reside(section, recipe.model, datasets, _room(recipe, device))):
        datasets = _resident(datasets, section.workers, device)
    streaming = Streaming(getattr(section, "window", _WINDOW), getattr(section, "lanes", 1))
    order = make_order(datasets.train, kind, recipe.train.global_batch, recipe.train.seed, streaming)
    is_moved = device.type == "cuda" and not _is_on(datasets.train, device)
    is_resident = _is_on(datasets.train, device) and device.type == "cuda"
    # Bytes travel between processes in a quarter of the time that floats take; what is in memory does not travel.
    is_better = is_moved or kind != "memory"
    is_wanted = section.transform_on == "device" or (section.transform_on == "auto" and is_better)
    on_device = is_wanted and not is_resident and objective.count is None

    batch = recipe.evaluate.batch or recipe.micro_batch(data_size)
    by_ray = {
        "train": RayFeed(recipe.train.global_batch, make_plan(recipe, order.steps_per_epoch).num_steps),
        "val": RayFeed(batch * data_size, 1),
    }

    def loading(part: str, dataset: Any) -> Loading:
        workers = section.workers
        kind = choose_loader(_like(section.loader, dataset), dataset) if dataset is not None else "memory"
        if kind == "memory" and workers == "auto":
            workers = 0
        if kind == "ray":
            workers = 1 if part == "val" else _RAY_READERS if workers == "auto" else max(1, workers)
        most = max(1, usable_cores() // process.local_world_size)
        if isinstance(dataset, IterableRows):
            most = 1
            if section.on_error == "skip":
                raise UserError(
                    "data.on_error: skip takes other samples by their number, which an iterable dataset has "
                    "not; have it leave out what it cannot read by itself"
                )
            if workers != "auto" and workers > 1:
                raise UserError(f"data.workers: {workers} would each go through a whole iterable dataset; set 1 or 0")
        return Loading(
            workers=workers,
            most_workers=most,
            pin_memory=is_moved,
            on_error=section.on_error,
            device=device if is_moved else torch.device("cpu"),
            transform_on_device=on_device,
            count=objective.count if is_moved else None,
            open_reader=by_ray[part].opener(part, dataset, process, order) if kind == "ray" else open_reader,
        )

    return Feeding(datasets, kind, order, loading("train", datasets.train), loading("val", datasets.val))


_WINDOW = 16_384
_MOST_BYTES, _MOST_SHARE = 2e9, 0.1
"""Of the memory of a GPU, what data may take unasked."""
_RAY_READERS = 2


def _like(asked: str, dataset: Any) -> str:
    """What is asked for the training data need not fit the validation data."""
    is_odd = asked == "stream" or (asked == "ray" and isinstance(dataset, IterableRows))
    return "auto" if is_odd else asked


def _may_reside(section: Any, model: Any, datasets: Datasets, room: float) -> bool:
    """Whether the samples fit into so many bytes, and nothing hinders batches from being made on the GPU."""
    if section.workers not in ("auto", 0) or section.transform_on == "cpu":
        return False
    parts = [dataset for dataset in (datasets.train, datasets.val) if dataset is not None]
    if not all(isinstance(dataset, MemoryDataset) for dataset in parts):
        return False
    # Only of our own text models it is known that what padding there is does not matter to them.
    if any(dataset.trims for dataset in parts) and not isinstance(model, Lstm):
        return False
    num_bytes: int = sum(tensor.nbytes for dataset in parts for tensor in dataset.tensors)
    return num_bytes <= room


def _room(recipe: Recipe, device: torch.device) -> float:
    """Bytes that data may take of a GPU unasked."""
    if device.type != "cuda":
        return -1
    of_worker = torch.cuda.get_device_properties(device).total_memory * (recipe.cluster.gpu_memory_share or 1.0)
    return min(_MOST_BYTES, _MOST_SHARE * of_worker)


def _resident(datasets: Datasets, workers: int | str, device: torch.device) -> Datasets:
    if device.type != "cuda":
        raise UserError("data.resident: is for the memory of a GPU, and this run has none; leave it out")
    if workers not in ("auto", 0):
        raise UserError(f"data.workers: {workers} processes cannot read what is in the memory of the GPU; leave it out")

    def moved(dataset: Any) -> Any:
        if dataset is None:
            return None
        if not isinstance(dataset, MemoryDataset):
            raise UserError(f"data.resident: {type(dataset).__name__} is not held as tensors; leave it out")
        return dataset.to(device)

    return Datasets(moved(datasets.train), moved(datasets.val), datasets.spec)


def _is_on(dataset: Any, device: torch.device) -> bool:
    return isinstance(dataset, MemoryDataset) and dataset.tensors[0].device == device
