"""Which strategies fit into the memory that there is, with which micro-batch, and which of them to take. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.core.errors import UserError
from shoal.parallel.degrees import DegreesError, find_degrees
from shoal.parallel.memory import needed
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.sizes import PARTS, Memory, Profile, Way
from shoal.parallel.traffic import sent
from shoal.recipe.parallel_checks import parallel_problems
from shoal.recipe.schema import Recipe

USABLE = 0.9
"""Of a device's memory, what tensors may take: the rest is for the driver, the network, and gaps between tensors."""

ProfileOf = Callable[[Way, int, bool], Profile]
"""(how a step is carried out, micro-batch, whether activations are recomputed) -> what that needs on one worker.
A `UserError` where the model cannot be divided so."""

_LONE: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "fsdp, offloaded": {"strategy": "fsdp", "fsdp": {"cpu_offload": True}},
}
_SEVERAL: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tensor x fsdp": {"strategy": "tensor", "tensor": {"across": "fsdp"}},
    "fsdp, offloaded": {"strategy": "fsdp", "fsdp": {"cpu_offload": True}},
    "zero-1": {"strategy": "deepspeed", "deepspeed": {"stage": 1}},
    "zero-2": {"strategy": "deepspeed", "deepspeed": {"stage": 2}},
    "zero-3": {"strategy": "deepspeed", "deepspeed": {"stage": 3}},
    "pipeline": {"strategy": "pipeline"},
    "tensor": {"strategy": "tensor"},
}
_AUTOMATIC = ("single", "ddp", "fsdp", "tensor x fsdp", "fsdp, offloaded")
"""What `auto` may take, the fastest first. Not DeepSpeed, which may not be installed, nor a pipeline, which wants many
micro-batches."""
_TENSOR_SIZES = (8, 4, 2)
"""Workers that share layers: no more than a machine usually has."""


@dataclass(frozen=True)
class Option:
    """A strategy with its settings."""

    name: str
    parallel: ParallelSection
    is_own: bool = False
    """Whether it is what the recipe asks for."""


@dataclass(frozen=True)
class Outcome:
    """What an option comes to."""

    option: Option
    problem: str | None = None
    """Why it is not possible; nothing else is known then."""
    micro_batch: int = 0
    """The recipe's own if that fits, else the largest that does, else one."""
    micro_batches: int = 0
    """Of a step, on each worker."""
    memory: Memory = field(default_factory=Memory)
    sent: int = 0
    fits: bool = False
    is_own_micro_batch: bool = True


@dataclass(frozen=True)
class Choice:
    """What `parallel.strategy: auto` takes, and why."""

    outcome: Outcome
    why: str
    hint: str | None = None
    """What would help where nothing fits, or only something slow."""


def num_moments(optim: OptimSection) -> int:
    """Numbers that the optimizer keeps for each weight."""
    if optim.name == "sgd":
        return 1 if optim.momentum else 0
    return 2


def options_of(recipe: Recipe) -> list[Option]:
    """What there is to choose from: the recipe's own strategy first, then all others as their settings are there."""
    own, workers = recipe.parallel, recipe.cluster.workers
    found = [Option(_name_of(own), own, is_own=True)] if own.strategy != "auto" else []
    for name, changes in (_LONE if workers == 1 else _SEVERAL).items():
        section = _changed(own, changes)
        if section.strategy == "tensor" and own.tensor.size is None:
            size = _tensor_size(recipe, section.tensor.across)
            section = section.model_copy(update={"tensor": section.tensor.model_copy(update={"size": size})})
            if size is None and section.tensor.across == "fsdp":  # the same as without
                continue
        if not any(section == other.parallel for other in found):
            found.append(Option(name, section))
    return found


def _changed(section: ParallelSection, changes: dict[str, Any]) -> ParallelSection:
    """The section with another strategy, and without what is for ddp alone."""
    tree = section.model_dump()
    for name, value in changes.items():
        tree[name] = tree[name] | value if isinstance(value, dict) else value
    if changes["strategy"] != "ddp":
        plain = ParallelSection()
        tree |= {name: getattr(plain, name) for name in ("compress", "hierarchical", "sync_every", "sync_batch_norm")}
    return ParallelSection.model_validate(tree)


def _tensor_size(recipe: Recipe, across: str) -> int | None:
    """The most workers that can share layers, and be on one machine; beside fsdp, some are left for that."""
    workers = recipe.cluster.workers
    heads = getattr(recipe.model, "heads", workers)
    sizes = [size for size in _TENSOR_SIZES if workers % size == 0 and heads % size == 0]
    return next((size for size in sizes if across == "ddp" or size < workers), None)


def _name_of(section: ParallelSection) -> str:
    if section.strategy == "deepspeed":
        return f"zero-{section.deepspeed.stage}"
    if section.strategy == "tensor" and section.tensor.across == "fsdp":
        return "tensor x fsdp"
    if section.strategy == "fsdp" and section.fsdp.cpu_offload:
        return "fsdp, offloaded"
    return section.strategy


def weigh(
    recipe: Recipe, option: Option, profile_of: ProfileOf, memory: int | None, on_gpu: bool, recompute: bool
) -> Outcome:
    """What an option comes to on workers with so many bytes of memory; None where that does not matter."""
    own = recipe.model_copy(update={"parallel": option.parallel})
    problem = next((f"{'.'.join(path)}: {words}" for path, words in parallel_problems(own)), None)
    if problem is not None:
        return Outcome(option, problem)
    try:
        way = way_of(own, on_gpu)
        return _weigh(own, option, way, profile_of, memory, recompute)
    except (UserError, DegreesError) as error:
        return Outcome(option, str(error).splitlines()[0])


def way_of(recipe: Recipe, on_gpu: bool) -> Way:
    """How a step of a recipe is carried out, but for its micro-batches."""
    strategy, workers = recipe.parallel.strategy, recipe.cluster.workers
    if strategy == "auto":
        strategy = "single" if workers == 1 else "ddp"
    degrees = find_degrees(recipe.parallel, strategy, workers)
    return Way(recipe.parallel, strategy, degrees, 1, num_moments(recipe.optim), recipe.train.precision, on_gpu)


def _weigh(
    recipe: Recipe, option: Option, way: Way, profile_of: ProfileOf, memory: int | None, recompute: bool
) -> Outcome:
    share = -(-recipe.train.global_batch // way.degrees.data)
    asked = recipe.micro_batch(way.degrees.data)
    limit = None if memory is None else int(USABLE * memory)

    def at(micro_batch: int) -> Outcome:
        this = replace(way, micro_batches=-(-share // micro_batch))
        profile = profile_of(this, micro_batch, recompute)
        found = needed(profile, this)
        fits = limit is None or found.total <= limit
        count = this.micro_batches
        return Outcome(option, None, micro_batch, count, found, sent(profile, this), fits, micro_batch == asked)

    first = at(asked)
    return first if first.fits else _largest_that_fits(at, [size for size in divisors(share) if size < asked]) or at(1)


def _largest_that_fits(at: Callable[[int], Outcome], sizes: Sequence[int]) -> Outcome | None:
    """By bisection: a larger micro-batch never needs less."""
    best, low, high = None, 0, len(sizes) - 1
    while low <= high:
        middle = (low + high) // 2
        found = at(sizes[middle])
        if found.fits:
            best, low = found, middle + 1
        else:
            high = middle - 1
    return best


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def choose(outcomes: Sequence[Outcome], memory: int | None, recomputed: Callable[[Option], Outcome]) -> Choice:
    """What `auto` takes: the fastest that fits.

    Args:
        outcomes: Of all options.
        memory: Bytes of a worker's device; None takes the fastest that is possible.
        recomputed: What an option would come to with train.activation_checkpointing.
    """
    by_name = {outcome.option.name: outcome for outcome in outcomes if outcome.problem is None}
    ranked = [by_name[name] for name in _AUTOMATIC if name in by_name]
    if not ranked:
        raise UserError(next(outcome.problem for outcome in outcomes if outcome.problem is not None))
    fitting = [outcome for outcome in ranked if outcome.fits]
    if fitting:
        return _chosen(fitting[0], ranked, memory, recomputed)
    least = min(ranked, key=lambda outcome: outcome.memory.total)
    hint = _hint(ranked, recomputed) or "more workers, a smaller model or shorter samples"
    assert memory is not None
    what = f"nothing fits into the {in_gib(USABLE * memory)} that a worker can use; {least.option.name} needs least"
    return Choice(least, f"{what}, {in_gib(least.memory.total)}", f"what would help: {hint}")


def _chosen(
    taken: Outcome, ranked: Sequence[Outcome], memory: int | None, recomputed: Callable[[Option], Outcome]
) -> Choice:
    name, total = taken.option.name, in_gib(taken.memory.total)
    if memory is None:
        return Choice(taken, f"{name} is the fastest that is possible; it needs {total}")
    usable = in_gib(USABLE * memory)
    if taken is ranked[0]:
        whole = "one worker" if name == "single" else "every worker"
        sends = "" if name == "single" else ", and nothing sends less"
        return Choice(taken, f"the whole model fits on {whole}: {total} of the {usable} that it can use{sends}")
    faster, would_need = ranked[0].option.name, in_gib(ranked[0].memory.total)
    why = f"{faster} would need {would_need} and a worker can use {usable}; {name} needs {total}"
    hint = _hint([outcome for outcome in ranked if outcome is not taken][:1], recomputed)
    return Choice(taken, why, hint)


def _hint(ranked: Sequence[Outcome], recomputed: Callable[[Option], Outcome]) -> str | None:
    for outcome in ranked:
        found = recomputed(outcome.option)
        if found.problem is None and found.fits:
            what = f"with train.activation_checkpointing=true, {outcome.option.name} would fit"
            return f"{what}: {in_gib(found.memory.total)}, micro-batch {found.micro_batch}"
    return None


def in_gib(size: float) -> str:
    """`1.25 GiB`, `12 MiB`"""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def weigh_all(recipe: Recipe, profile_of: ProfileOf, memory: int | None, on_gpu: bool) -> tuple[list[Outcome], Choice]:
    """Every option, and the one that `auto` takes."""
    recompute = recipe.train.activation_checkpointing
    outcomes = [weigh(recipe, option, profile_of, memory, on_gpu, recompute) for option in options_of(recipe)]

    def recomputed(option: Option) -> Outcome:
        return weigh(recipe, option, profile_of, memory, on_gpu, recompute=True)

    return outcomes, choose(outcomes, memory, recomputed)


def records(outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    """For JSON."""
    for outcome in outcomes:
        settings = outcome.option.parallel.model_dump(mode="json", exclude_defaults=True)
        record: dict[str, Any] = {"name": outcome.option.name, "parallel": settings, "is_own": outcome.option.is_own}
        if outcome.problem is not None:
            yield record | {"possible": False, "problem": outcome.problem}
            continue
        memory = outcome.memory
        parts = {name: getattr(memory, name) for name in PARTS}
        yield record | {
            "possible": True,
            "fits": outcome.fits,
            "micro_batch": outcome.micro_batch,
            "accumulation": outcome.micro_batches,
            "memory_bytes": parts | {"total": memory.total, "host": memory.host},
            "worst_moment": memory.when,
            "sent_bytes_per_step": outcome.sent,
        }
