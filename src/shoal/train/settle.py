"""What a recipe leaves open until the workers have met: the strategy, and the micro-batch. Both are `auto` then."""

import gc
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import RunError, UserError
from shoal.core.process import Process
from shoal.core.section import Section
from shoal.core.spec import DataSpec
from shoal.data.loader import train_batches
from shoal.data.section import CharText, ImageFolder
from shoal.observe.runs import read_events
from shoal.parallel.degrees import find_degrees
from shoal.parallel.section import ParallelSection
from shoal.recipe.schema import Recipe
from shoal.train.advise import divisors, num_moments
from shoal.train.build import build
from shoal.train.restore import on_first
from shoal.train.shapes import known_shapes

SETTLED = "settled"
"""The event that keeps what was found, for those who go on with the run."""
_OBVIOUS = 0.25
"""A model whose weights, gradients and optimizer state take no more of a worker's memory is not looked at further."""


@dataclass(frozen=True)
class Settled:
    """A recipe with nothing left open."""

    recipe: Recipe
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Events for those who want to know."""


def settle(recipe: Recipe, process: Process, run_dir: Path) -> Settled:
    """Choose what the recipe leaves to us. Every worker must call this, and comes to the same."""
    auto_strategy = recipe.parallel.strategy == "auto" and process.world_size > 1
    auto_batch = recipe.train.micro_batch == "auto"
    if not auto_strategy and not auto_batch:
        return Settled(recipe)
    recipe = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"workers": process.world_size})})
    if (kept := on_first(process.group, lambda: _remembered(run_dir, process))) is not None:
        return Settled(_with(recipe, kept["parallel"], kept["micro_batch"]))
    facts: dict[str, Any] = {"world_size": process.world_size, "device": _device_name(process)}
    words = []
    if auto_strategy:
        parallel, why = on_first(process.group, lambda: _choose_strategy(recipe, process))
        recipe = _with(recipe, parallel, recipe.train.micro_batch)
        if why is not None:
            words.append(f"strategy {recipe.parallel.strategy}: {why}")
    if auto_batch:
        first = on_first(process.group, lambda: _foreseen_micro_batch(recipe, process))
        size = _largest_that_fits(recipe, first, process)
        recipe = _with(recipe, recipe.parallel.model_dump(mode="json"), size)
        words.append(f"micro-batch {size}, the largest that fits")
    if not words:  # ddp, as everybody expects, and nothing to remember
        return Settled(recipe)
    facts |= {"parallel": recipe.parallel.model_dump(mode="json"), "micro_batch": recipe.train.micro_batch}
    return Settled(recipe, [(SETTLED, facts | {"words": "; ".join(words)})])


def _with(recipe: Recipe, parallel: dict[str, Any], micro_batch: Any) -> Recipe:
    train = recipe.train.model_copy(update={"micro_batch": micro_batch})
    return recipe.model_copy(update={"parallel": ParallelSection.model_validate(parallel), "train": train})


def _remembered(run_dir: Path, process: Process) -> dict[str, Any] | None:
    """What was settled before for as many workers on such devices: a run that goes on computes what it would have."""
    here = (process.world_size, _device_name(process))
    found = [event for event in read_events(run_dir) if event.get("event") == SETTLED]
    return next((event for event in reversed(found) if (event["world_size"], event["device"]) == here), None)


def _device_name(process: Process) -> str:
    return torch.cuda.get_device_name(process.device) if process.device.type == "cuda" else "cpu"


def worker_memory(recipe: Recipe, process: Process) -> int:
    """Bytes that this worker may take of its GPU, or of the machine."""
    if process.device.type == "cuda":
        share = recipe.cluster.gpu_memory_fraction or 1.0
        return int(torch.cuda.get_device_properties(process.device).total_memory * share)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // process.local_world_size


def _choose_strategy(recipe: Recipe, process: Process) -> tuple[dict[str, Any], str | None]:
    """The parallel section with a strategy, and why; no reason where the choice is plain."""
    plain = recipe.parallel.model_copy(update={"strategy": "ddp"}).model_dump(mode="json")
    memory = worker_memory(recipe, process)
    parameters = _count_parameters(recipe)
    held = 4 * parameters * (3 + num_moments(recipe.optim))  # weights, gradients, and buckets of them
    if held <= _OBVIOUS * memory:
        return plain, None
    from shoal.train.forecast import forecast

    choice = forecast(_open_batch(recipe), memory, process.device.type == "cuda").choice
    return choice.outcome.option.parallel.model_dump(mode="json"), choice.why


def _count_parameters(recipe: Recipe) -> int:
    """Of a model of ours, without building it; of others nothing is known before they are built."""
    from shoal.models.build import build_model

    if recipe.model is None or ":" in recipe.model.name or ":" in recipe.task.name:
        return 0
    if (spec := _rough_spec(recipe.data)) is None:
        return 0
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(recipe.model, spec).parameters())


def _rough_spec(section: Section | None) -> DataSpec | None:
    """What a model is sized by, about, without a look at the data."""
    if (known := known_shapes(section)) is not None:
        return known.spec
    if isinstance(section, CharText):
        return DataSpec(vocab_size=256, context=section.context)
    if isinstance(section, ImageFolder):
        return DataSpec(image_shape=(3, section.size, section.size), num_classes=1000)
    return None


def _open_batch(recipe: Recipe) -> Recipe:
    """With the micro-batch left open, as everything that computes with it expects it."""
    if recipe.train.micro_batch != "auto":
        return recipe
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"micro_batch": None})})


def _foreseen_micro_batch(recipe: Recipe, process: Process) -> int:
    from shoal.train.forecast import largest_micro_batch

    memory, on_gpu = worker_memory(recipe, process), process.device.type == "cuda"
    outcome = largest_micro_batch(_open_batch(recipe), memory, on_gpu)
    if outcome.problem is not None:
        raise UserError(outcome.problem)
    return outcome.micro_batch


def _largest_that_fits(recipe: Recipe, first: int, process: Process) -> int:
    """The foreseen micro-batch, or the next smaller one that a step can really be computed with.

    On the CPU the forecast has to do: what is too much there ends the process, and there is nothing to back off from.
    """
    if process.device.type != "cuda":
        return first
    strategy = recipe.parallel.strategy if recipe.parallel.strategy != "auto" else "single"
    shares = find_degrees(recipe.parallel, strategy, process.world_size).data
    share = -(-recipe.train.global_batch // shares)
    for size in reversed([size for size in divisors(share) if size <= first] or [first]):
        if all(process.group.gather(_fits(_with(recipe, recipe.parallel.model_dump(mode="json"), size), process))):
            return size
    raise RunError(
        "train.micro_batch: not even one sample at a time fits into this GPU's memory; see what `shoal plan` says, "
        "train.activation_checkpointing=true, or more workers with parallel.strategy=fsdp"
    )


def _fits(recipe: Recipe, process: Process) -> bool:
    """Whether two whole steps can be computed; what was built for them is gone afterwards."""
    try:
        _take_steps(recipe, process)
        fits = True
    except torch.OutOfMemoryError:
        fits = False
    gc.collect()  # a unit and its hooks know each other
    torch.cuda.empty_cache()
    return fits


def _take_steps(recipe: Recipe, process: Process) -> None:
    built = build(recipe, process)
    unit = built.unit
    batches = train_batches(
        built.datasets.train,
        built.order,
        0,
        2,  # the first makes the optimizer's state
        rank=unit.data_rank,
        world_size=unit.data_size,
        micro_batch=recipe.micro_batch(unit.data_size),
    )
    for batch in batches:
        unit.forward_backward(batch)
        unit.optimizer_step(recipe.optim.lr)
    torch.cuda.synchronize(process.device)
