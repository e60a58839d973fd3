"""What a recipe will need, before anything runs: its model traced, every strategy weighed."""

import os
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import UserError
from shoal.parallel.sizes import Profile, Way
from shoal.recipe.schema import Recipe
from shoal.train.advise import Choice, Option, Outcome, records, weigh, weigh_all
from shoal.train.trace import Tracer, form_of


@dataclass(frozen=True)
class Forecast:
    """What is foreseen."""

    recipe: Recipe
    on_gpu: bool
    memory: int
    """Bytes of the device of one worker."""
    parameters: int
    outcomes: list[Outcome]
    choice: Choice
    notes: list[str]
    """What the figures leave out."""

    @property
    def own(self) -> Outcome:
        """The outcome of what the recipe asks for."""
        return next((outcome for outcome in self.outcomes if outcome.option.is_own), self.choice.outcome)

    def to_record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "recipe": self.recipe.name,
            "parameters": self.parameters,
            "device": "gpu" if self.on_gpu else "cpu",
            "device_memory_bytes": self.memory,
            "workers": self.recipe.cluster.workers,
            "global_batch": self.recipe.train.global_batch,
            "strategies": list(records(self.outcomes)),
            "auto": {"name": self.choice.outcome.option.name, "why": self.choice.why, "hint": self.choice.hint},
            "notes": self.notes,
        }


def forecast(recipe: Recipe, memory: int, on_gpu: bool) -> Forecast:
    """Weigh every strategy for a recipe on workers whose devices have so many bytes of memory."""
    tracer = Tracer(recipe, on_gpu)

    def profile_of(way: Way, micro_batch: int, recompute: bool) -> Profile:
        return tracer.profile(micro_batch, form_of(way, recompute))

    outcomes, choice = weigh_all(recipe, profile_of, memory, on_gpu)
    parameters = tracer.profile(1 if tracer.is_fake else 2).parameters
    return Forecast(recipe, on_gpu, memory, parameters, outcomes, choice, _notes(recipe, tracer))


def largest_micro_batch(recipe: Recipe, memory: int, on_gpu: bool) -> Outcome:
    """What a recipe's own strategy comes to with the largest micro-batch that fits: for `train.micro_batch: auto`."""
    tracer = Tracer(recipe, on_gpu)

    def profile_of(way: Way, micro_batch: int, recompute: bool) -> Profile:
        return tracer.profile(micro_batch, form_of(way, recompute))

    option = Option(recipe.parallel.strategy, recipe.parallel, is_own=True)
    return weigh(recipe, option, profile_of, memory, on_gpu, recipe.train.activation_checkpointing)


def _notes(recipe: Recipe, tracer: Tracer) -> list[str]:
    notes = []
    if recipe.train.compile:
        notes.append("train.compile: figures are those without it; a compiled model mostly needs less")
    if not tracer.is_fake:
        notes.append("model: could not be traced without running it, so larger micro-batches are extrapolated")
        if tracer.on_gpu:
            notes.append("model: was run on the CPU, whose kernels keep more than those of a GPU")
    return notes


def memory_of_worker(recipe: Recipe) -> tuple[int, bool]:
    """Bytes of memory that a worker has on this machine, and whether on a GPU."""
    import torch

    wanted = recipe.cluster.gpus_per_worker
    if wanted != 0 and torch.cuda.is_available():
        share = recipe.cluster.gpu_memory_fraction or 1.0
        return int(torch.cuda.get_device_properties(0).total_memory * share), True
    if wanted:
        raise UserError("--gpu-memory: how much a GPU has is not known on a machine without one; give it, as in 80GiB")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole // recipe.cluster.workers, False
