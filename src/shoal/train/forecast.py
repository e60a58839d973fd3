"""What a recipe will need, before anything runs: its model traced, every strategy weighed."""

from dataclasses import dataclass, replace
from typing import Any

from shoal.core.errors import UserError
from shoal.core.machine import machine_memory
from shoal.parallel.sizes import Profile, Way
from shoal.recipe.automatic import CPU, GPU, with_numerics
from shoal.recipe.schema import Recipe
from shoal.train.advise import USABLE, Choice, Option, Outcome, in_gib, records, settings_of, to_take, weigh, weigh_all
from shoal.train.trace import Tracer, form_of

_OF_PROCESS = 2 << 30
"""Of the host's memory, what a worker on a GPU takes without its tensors: libraries, and what CUDA keeps there."""


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

    @property
    def usable(self) -> int:
        """Of that memory, what tensors may take."""
        return int(USABLE * self.memory)

    def to_record(self) -> dict[str, Any]:
        """For JSON."""
        chosen = self.choice.outcome
        return {
            "recipe": self.recipe.name,
            "parameters": self.parameters,
            "device": "gpu" if self.on_gpu else "cpu",
            "device_memory_bytes": self.memory,
            "usable_bytes": self.usable,
            "workers": self.recipe.cluster.workers,
            "global_batch": self.recipe.train.global_batch,
            "strategies": list(records(self.outcomes)),
            "auto": {
                "name": chosen.option.name,
                "parallel": settings_of(chosen.option),
                "fits": chosen.fits,
                "micro_batch": chosen.micro_batch,
                "why": self.choice.why,
                "hint": self.choice.hint,
            },
            "notes": self.notes,
        }


def forecast(recipe: Recipe, memory: int, on_gpu: bool) -> Forecast:
    """Weigh every strategy for a recipe on workers whose devices have so many bytes of memory."""
    recipe = with_numerics(recipe, GPU if on_gpu else CPU)
    tracer = Tracer(recipe, on_gpu)

    def profile_of(way: Way, micro_batch: int, recompute: bool) -> Profile:
        return tracer.profile(micro_batch, form_of(way, recompute))

    outcomes, choice = weigh_all(recipe, profile_of, memory, on_gpu)
    if recipe.parallel.strategy == "auto" and recipe.cluster.workers > 1 and _is_own_model(recipe):
        choice = _unseen(outcomes, choice)
    return Forecast(recipe, on_gpu, memory, tracer.num_parameters(), outcomes, choice, _notes(recipe, tracer))


def largest_micro_batch(recipe: Recipe, memory: int, on_gpu: bool) -> Outcome:
    """What a recipe's own strategy comes to with the largest micro-batch that fits: for `train.micro_batch: auto`."""
    recipe = with_numerics(recipe, GPU if on_gpu else CPU)
    tracer = Tracer(recipe, on_gpu)

    def profile_of(way: Way, micro_batch: int, recompute: bool) -> Profile:
        return tracer.profile(micro_batch, form_of(way, recompute))

    option = Option(recipe.parallel.strategy, recipe.parallel, is_own=True)
    return weigh(recipe, option, profile_of, memory, on_gpu, recipe.train.activation_checkpointing)


def _unseen(outcomes: list[Outcome], choice: Choice) -> Choice:
    """What a run takes that does not look; and what it would take if it did."""
    ddp = next(outcome for outcome in outcomes if outcome.option.name == "ddp")
    why = "a run does not look at a model of your own before it builds it"
    if choice.outcome is ddp or ddp.problem is not None:
        return replace(choice, why=f"{why}; {choice.why}")
    better = f"better: {to_take(choice.outcome)}, because {choice.why}"
    return Choice(ddp, why, "\n".join(filter(None, [better, choice.hint])))


def _notes(recipe: Recipe, tracer: Tracer) -> list[str]:
    notes, cluster = [], recipe.cluster
    if cluster.min_workers is not None and cluster.min_workers < cluster.workers:
        notes.append(
            f"cluster.min_workers: figures are for {cluster.workers} workers; with {cluster.min_workers} each holds "
            f"more and computes more: see what --workers {cluster.min_workers} gives"
        )
    if recipe.train.compile is True:
        notes.append("train.compile: figures are those without it; a compiled model mostly needs less")
    if not tracer.is_fake:
        notes.append("model: could not be traced without running it, so larger micro-batches are extrapolated")
        if tracer.on_gpu:
            notes.append("model: was run on the CPU, whose kernels keep more than those of a GPU")
    return notes


def with_host_notes(found: Forecast) -> Forecast:
    """For GPUs of this machine, if any: with a note on every strategy that would keep too much in its memory."""
    import torch

    workers = min(found.recipe.cluster.workers, max(torch.cuda.device_count(), 1))
    problems = [too_little_host(outcome, workers) for outcome in found.outcomes if outcome.problem is None]
    return replace(found, notes=[*found.notes, *(f"in host: {problem}" for problem in problems if problem is not None)])


def too_little_host(outcome: Outcome, workers: int) -> str | None:
    """In words, where so many workers on this machine would keep more in its memory than it has."""
    host, there = outcome.memory.host, machine_memory()
    if not host or workers * (host + _OF_PROCESS) <= there:
        return None
    what = f"{outcome.option.label} keeps {in_gib(workers * host)} in the host's memory"
    each = f" beside the {in_gib(_OF_PROCESS)} that a worker takes by itself"
    return f"{what}{each}, and this machine has {in_gib(there)}"


def _is_own_model(recipe: Recipe) -> bool:
    return recipe.model is None or ":" in recipe.model.name or ":" in recipe.task.name


def memory_of_worker(recipe: Recipe, of_gpu: int | None = None) -> tuple[int, bool]:
    """Bytes of memory that a worker has on this machine, or of a GPU that has `of_gpu`, and whether on a GPU."""
    import torch

    wanted = recipe.cluster.gpus_per_worker
    if of_gpu is None and wanted != 0 and torch.cuda.is_available():
        of_gpu = torch.cuda.get_device_properties(0).total_memory
    if of_gpu is not None:
        return int(of_gpu * (recipe.cluster.gpu_memory_share or 1.0)), True
    if wanted:
        raise UserError("--gpu-memory: how much a GPU has is not known on a machine without one; give it, as in 80GiB")
    return machine_memory() // recipe.cluster.workers, False
