"""What a recipe leaves open until the workers have met: the strategy, and the micro-batch. Both are `auto` then."""

import gc
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import UserError
from shoal.core.machine import machine_memory
from shoal.core.process import Process
from shoal.core.section import Section
from shoal.core.spec import DataSpec
from shoal.data.section import CharText, ImageFolder
from shoal.observe.runs import read_events
from shoal.parallel.section import ParallelSection
from shoal.recipe.identity import fixed_fields
from shoal.recipe.schema import Recipe
from shoal.train.advise import USABLE, as_overrides, divisors, in_gib, num_moments
from shoal.train.build import build
from shoal.train.restore import on_first
from shoal.train.shapes import known_shapes

SETTLED = "settled"
"""The event that keeps what was found, for those who go on with the run."""
_OBVIOUS = 0.25
"""A model whose weights, gradients and optimizer state take no more of a worker's memory is not looked at further."""
_UNTRIED = 0.8
"""Of what is usable, what a micro-batch may take where it is not tried before it is taken."""


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
    facts = {"world_size": process.world_size, "device": _device_name(process), "asked": _asked(recipe)}
    recipe = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"workers": process.world_size})})
    if (kept := on_first(process.group, lambda: _remembered(run_dir, facts))) is not None:
        return Settled(_with(recipe, kept["parallel"], kept["micro_batch"]))
    memory, on_gpu = min(process.group.gather(worker_memory(recipe, process))), process.device.type == "cuda"
    given, words = recipe.parallel.model_dump(mode="json"), []
    if auto_strategy:
        changes, size, why = on_first(process.group, lambda: _choose_strategy(recipe, memory, on_gpu))
        recipe = _with(recipe, changes, size)
        if why is not None:
            words.append(f"strategy {recipe.parallel.strategy}: {why}")
    if auto_batch:
        size, why = on_first(process.group, lambda: _foreseen_micro_batch(recipe, memory, on_gpu))
        if _can_try(recipe, on_gpu):
            size = _largest_that_fits(recipe, size, memory, process)
        recipe = _with(recipe, {}, size)
        words.append(f"micro-batch {size}, {why}")
    if not words:  # ddp, as everybody expects, and nothing to remember
        return Settled(recipe)
    changes = _difference(given, recipe.parallel.model_dump(mode="json"))
    found = {"parallel": changes, "micro_batch": recipe.train.micro_batch, "words": "; ".join(words)}
    return Settled(recipe, [(SETTLED, facts | found)])


def _with(recipe: Recipe, changes: dict[str, Any], micro_batch: Any) -> Recipe:
    """The recipe with some fields of its parallel section changed, and with a micro-batch if it does not say one."""
    tree = recipe.parallel.model_dump(mode="json")
    for name, value in changes.items():
        tree[name] = tree[name] | value if isinstance(value, dict) else value
    if isinstance(recipe.train.micro_batch, int):
        micro_batch = recipe.train.micro_batch
    train = recipe.train.model_copy(update={"micro_batch": micro_batch})
    return recipe.model_copy(update={"parallel": ParallelSection.model_validate(tree), "train": train})


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What of `after` is not as it was."""
    changed = {name: value for name, value in after.items() if value != before[name]}
    return {
        name: _difference(before[name], value) if isinstance(value, dict) else value for name, value in changed.items()
    }


def _asked(recipe: Recipe) -> str:
    """Stands for all of a recipe that the result depends on. A hash, because values may be from the environment."""
    train = recipe.train
    parts = [
        fixed_fields(recipe),
        recipe.parallel.model_dump(mode="json"),
        [train.micro_batch, train.precision, train.activation_checkpointing, train.compile],
        [num_moments(recipe.optim), recipe.cluster.gpu_memory_share],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _remembered(run_dir: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    """What was settled before, where the same was asked for as many workers on such devices: a run that goes on
    computes what it would have."""
    found = [event for event in read_events(run_dir) if event.get("event") == SETTLED]
    return next((event for event in reversed(found) if facts.items() <= event.items()), None)


def _device_name(process: Process) -> str:
    return torch.cuda.get_device_name(process.device) if process.device.type == "cuda" else "cpu"


def worker_memory(recipe: Recipe, process: Process) -> int:
    """Bytes that this worker may take of its GPU, or of the machine."""
    if process.device.type == "cuda":
        share = recipe.cluster.gpu_memory_share or 1.0
        return int(torch.cuda.get_device_properties(process.device).total_memory * share)
    return machine_memory() // process.local_world_size


def _choose_strategy(recipe: Recipe, memory: int, on_gpu: bool) -> tuple[dict[str, Any], Any, str | None]:
    """What to change in the parallel section, the micro-batch, and why; no reason where the choice is plain."""
    asked = recipe.train.micro_batch
    parameters = _count_parameters(recipe)
    held = 4 * parameters * (3 + num_moments(recipe.optim))  # weights, gradients, and buckets of them
    if held <= _OBVIOUS * memory:
        return {"strategy": "ddp"}, asked, None
    from shoal.train.forecast import forecast

    choice = forecast(_open_batch(recipe), memory, on_gpu).choice
    outcome, why = choice.outcome, choice.why
    if not outcome.fits:
        why = "; ".join(filter(None, [why, choice.hint]))
        if asked == "auto":
            raise UserError(f"train.micro_batch: {why}")
    changes = _difference(recipe.parallel.model_dump(mode="json"), outcome.option.parallel.model_dump(mode="json"))
    if asked == "auto" or outcome.is_own_micro_batch:
        return changes, asked, why
    if asked is None:
        return changes, outcome.micro_batch, f"{why}, with micro-batch {outcome.micro_batch}"
    return changes, asked, f"{why}; that is with train.micro_batch={outcome.micro_batch}, and the recipe says {asked}"


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


def _can_try(recipe: Recipe, on_gpu: bool) -> bool:
    """Whether a micro-batch can be tried before it is taken.

    Not with several workers: one that runs out of memory would leave the others waiting for it in the middle of a step,
    and what they wait in could not be used for the run afterwards. Not on the CPU either: what is too much there ends
    the process.
    """
    return on_gpu and recipe.cluster.workers == 1


def _foreseen_micro_batch(recipe: Recipe, memory: int, on_gpu: bool) -> tuple[int, str]:
    """The largest that should fit, and what to say of it."""
    from shoal.train.forecast import largest_micro_batch

    can_try = _can_try(recipe, on_gpu)
    is_blind = on_gpu and not can_try
    outcome = largest_micro_batch(_open_batch(recipe), int(_UNTRIED * memory) if is_blind else memory, on_gpu)
    if outcome.problem is not None:
        raise UserError(outcome.problem)
    if is_blind and outcome.fits:
        return outcome.micro_batch, "foreseen to fit with a fifth to spare; with several GPUs it is not tried"
    if is_blind and largest_micro_batch(_open_batch(recipe), memory, on_gpu).fits:  # where this is the smallest
        return outcome.micro_batch, "foreseen to fit with little to spare; with several GPUs it is not tried"
    if outcome.fits or can_try:
        return outcome.micro_batch, "the largest that fits"
    raise _nothing_fits(recipe, memory, on_gpu)


def _nothing_fits(recipe: Recipe, memory: int, on_gpu: bool) -> UserError:
    """How much is needed, how much there is, and what would help."""
    from shoal.train.forecast import forecast, largest_micro_batch

    least = largest_micro_batch(_open_batch(recipe), 0, on_gpu)  # without any memory: the smallest that is possible
    choice = forecast(_open_batch(recipe), memory, on_gpu).choice
    better, hint = choice.outcome, choice.hint
    own = recipe.parallel.model_dump(mode="json")
    if own["strategy"] == "auto":  # with one worker
        own["strategy"] = "single"
    if better.fits and (changes := _difference(own, better.option.parallel.model_dump(mode="json"))):
        overrides = " ".join(as_overrides(changes, "parallel"))
        hint = f"what would help: {overrides}, which needs {in_gib(better.memory.total)}"
    needs = f"not even {least.micro_batch} at a time fits: `shoal plan` foresees {in_gib(least.memory.total)}"
    there_is = f"a worker can use {in_gib(USABLE * memory)}"
    hint = hint or "what would help: more workers, a smaller model or shorter samples"
    return UserError(f"train.micro_batch: {needs}, and {there_is}; {hint}")


def _largest_that_fits(recipe: Recipe, first: int, memory: int, process: Process) -> int:
    """The foreseen micro-batch, or the next smaller one that a step can really be computed with."""
    for size in reversed([size for size in divisors(recipe.train.global_batch) if size <= first]):
        if _fits(_with(recipe, {}, size), process):
            return size
    raise _nothing_fits(recipe, memory, on_gpu=True)


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
    for batch in built.batches(0, 2):  # the first makes the optimizer's state
        unit.forward_backward(batch)
        unit.optimizer_step(recipe.optim.lr)
    torch.cuda.synchronize(process.device)
