"""Which strategies fit into the memory that there is, with which micro-batch, and which of them to take. Pure."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.core.errors import UserError
from shoal.parallel.degrees import DegreesError, find_degrees, in_words
from shoal.parallel.memory import needed
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.sizes import PARTS, Memory, Profile, Way
from shoal.parallel.traffic import sent
from shoal.recipe.checks import problems
from shoal.recipe.parallel_checks import num_shares, unused_sections
from shoal.recipe.schema import Recipe

USABLE = 0.9
"""Of a device's memory, what tensors may take: the rest is for the driver, the network, and gaps between tensors."""

ProfileOf = Callable[[Way, int, bool], Profile]
"""(how a step is carried out, micro-batch, whether activations are recomputed) -> what that needs on one worker.
A `UserError` where the model cannot be divided so; `TooFewSamplesError` where it is the micro-batch."""

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
_AUTOMATIC = ("ddp", "fsdp", "tensor x fsdp", "fsdp, offloaded")
"""What `auto` may take with several workers, the fastest first. Not DeepSpeed, which may not be installed, nor a
pipeline, which wants many micro-batches. With one worker it is always single."""
_TENSOR_SIZES = (8, 4, 2)
"""Workers that share layers: no more than a machine usually has."""


class TooFewSamplesError(UserError):
    """The model cannot be trained with so small a micro-batch, but may be with a larger one."""


@dataclass(frozen=True)
class Option:
    """A strategy with its settings."""

    name: str
    parallel: ParallelSection
    is_own: bool = False
    """Whether it is what the recipe asks for."""
    sizes: str | None = None
    """The same with the sizes of its groups, where workers can be divided so."""

    @property
    def label(self) -> str:
        """For people to read."""
        return self.sizes or self.name


@dataclass(frozen=True)
class Outcome:
    """What an option comes to."""

    option: Option
    problem: str | None = None
    """Why it is not possible; nothing else is known then."""
    micro_batch: int = 0
    """The recipe's own if that fits, else the largest that does, else the smallest that the model can be trained with.
    Where the recipe's own does not divide what is a worker's under this strategy, the nearest that does."""
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
    """Not possible where the recipe asks for another strategy, and none that `auto` may take is."""
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
    found = [Option(_name_of(own), own, True, _sizes_of(own, workers))] if own.strategy != "auto" else []
    for name, changes in (_LONE if workers == 1 else _SEVERAL).items():
        section = _changed(own, changes)
        if section.strategy == "tensor" and own.tensor.size is None:
            size = _tensor_size(recipe, section.tensor.across)
            section = section.model_copy(update={"tensor": section.tensor.model_copy(update={"size": size})})
            if size is None and section.tensor.across == "fsdp":  # the same as without
                continue
        option = Option(name, section, sizes=_sizes_of(section, workers))
        # The recipe's own may leave a size open that is the same in the end.
        if not any(section == other.parallel or (name, option.sizes) == (other.name, other.sizes) for other in found):
            found.append(option)
    return found


def _sizes_of(section: ParallelSection, workers: int) -> str | None:
    try:
        return in_words(section, section.strategy, find_degrees(section, section.strategy, workers))
    except DegreesError:
        return None


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
    own = _under(recipe, option)
    problem = next((f"{'.'.join(path)}: {words}" for path, words in problems(own)), None)
    if problem is not None:
        return Outcome(option, problem)
    try:
        found = _weigh(own, option, way_of(own, on_gpu), profile_of, memory, recompute)
    except (UserError, DegreesError) as error:
        return Outcome(option, str(error).splitlines()[0])
    # With workers that come and go, no more than a worker's share is computed at once anyway.
    is_kept = own.train.micro_batch == recipe.train.micro_batch or recipe.cluster.min_workers is not None
    return replace(found, is_own_micro_batch=found.is_own_micro_batch and is_kept)


def _under(recipe: Recipe, option: Option) -> Recipe:
    """The recipe with an option, under which a worker's share of a step may be another: with a micro-batch for it."""
    own, size = recipe.model_copy(update={"parallel": option.parallel}), recipe.train.micro_batch
    shares = num_shares(own)
    if not isinstance(size, int) or shares is None:
        return own
    share = -(-recipe.train.global_batch // shares)
    if recipe.cluster.min_workers is not None:  # shares change with the workers, and need not be divided evenly
        nearest = min(size, share)
    else:
        nearest = min(divisors(share), key=lambda divisor: abs(divisor - size))
    return own.model_copy(update={"train": recipe.train.model_copy(update={"micro_batch": nearest})})


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
    return first if first.fits else _largest_that_fits(at, [size for size in divisors(share) if size < asked]) or first


def _largest_that_fits(at: Callable[[int], Outcome], sizes: Sequence[int]) -> Outcome | None:
    """By bisection: a larger micro-batch never needs less. Where none fits, the smallest that is possible, if any."""
    best, least, low, high = None, None, 0, len(sizes) - 1
    while low <= high:
        middle = (low + high) // 2
        try:
            found = at(sizes[middle])
        except TooFewSamplesError:
            low = middle + 1
            continue
        if found.fits:
            best, low = found, middle + 1
        else:
            least, high = found, middle - 1
    return best or least


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def choose(
    outcomes: Sequence[Outcome],
    memory: int | None,
    recomputed: Callable[[Option], Outcome],
    keeps_micro_batch: bool = False,
) -> Choice:
    """What `auto` takes: the fastest that fits.

    Args:
        outcomes: Of all options.
        memory: Bytes of a worker's device; None takes the fastest that is possible.
        recomputed: What an option would come to with train.activation_checkpointing.
        keeps_micro_batch: Whether a run has the recipe's own micro-batch whatever fits, so that what fits with it comes
            before what is faster and needs another.
    """
    by_name = {outcome.option.name: outcome for outcome in outcomes if outcome.problem is None}
    is_lone = any(outcome.option.name == "single" for outcome in outcomes)
    names = ("single",) if is_lone else _AUTOMATIC
    ranked = [by_name[name] for name in names if name in by_name]
    if not ranked:
        return _impossible(outcomes, names)
    fitting = [outcome for outcome in ranked if outcome.fits]
    if keeps_micro_batch:
        fitting.sort(key=lambda outcome: not outcome.is_own_micro_batch)
    if fitting:
        return _chosen(fitting[0], ranked, memory, recomputed)
    assert memory is not None
    least, usable = min(ranked, key=lambda outcome: outcome.memory.total), in_gib(USABLE * memory)
    name, total = least.option.label, in_gib(least.memory.total)
    why = f"nothing fits into the {usable} that a worker can use; {name} needs least, {total}"
    if is_lone:
        why = f"there is one worker; it can use {usable}, and needs {total}"
    hint = _hint(ranked, recomputed) or _other(outcomes) or "more workers, a smaller model or shorter samples"
    return Choice(least, why, f"what would help: {hint}")


def _impossible(outcomes: Sequence[Outcome], names: Sequence[str]) -> Choice:
    """Of all that `auto` may take; a user error unless the recipe asks for something else, and that is possible."""
    first = next(outcome for outcome in outcomes if outcome.option.name in names)
    assert first.problem is not None
    if not any(outcome.option.is_own and outcome.problem is None for outcome in outcomes):
        raise UserError(first.problem)
    return Choice(first, first.problem)


def _chosen(
    taken: Outcome, ranked: Sequence[Outcome], memory: int | None, recomputed: Callable[[Option], Outcome]
) -> Choice:
    name, total, faster = taken.option.label, in_gib(taken.memory.total), ranked[0]
    if memory is None:
        return Choice(taken, f"{name} is the fastest that is possible; it needs {total}")
    usable = in_gib(USABLE * memory)
    if taken is faster:
        whole = "one worker" if taken.option.name == "single" else "every worker"
        return Choice(taken, f"the whole model fits on {whole}: {total} of the {usable} that it can use")
    if faster.fits:
        why = f"{faster.option.label} would need train.micro_batch={faster.micro_batch}"
        return Choice(taken, f"{why}, which is not the recipe's; {name} needs {total} of {usable} with that")
    why = f"{faster.option.label} would need {in_gib(faster.memory.total)} and a worker can use {usable}"
    return Choice(taken, f"{why}; {name} is the fastest that fits, {total}", _hint([faster], recomputed))


def _hint(ranked: Sequence[Outcome], recomputed: Callable[[Option], Outcome]) -> str | None:
    for outcome in ranked:
        found = recomputed(outcome.option)
        if found.problem is None and found.fits:
            what = f"with train.activation_checkpointing=true, {outcome.option.label} would fit"
            return f"{what}: {in_gib(found.memory.total)}, micro-batch {found.micro_batch}"
    return None


def _other(outcomes: Sequence[Outcome]) -> str | None:
    """What fits, though `auto` does not take it."""
    for outcome in outcomes:
        if outcome.problem is None and outcome.fits:
            return f"{to_take(outcome)}, which fits: {in_gib(outcome.memory.total)}"
    return None


def to_take(outcome: Outcome) -> str:
    """What to write behind a recipe to have this."""
    settings = [*as_overrides(settings_of(outcome.option), "parallel")]
    if not outcome.is_own_micro_batch:
        settings.append(f"train.micro_batch={outcome.micro_batch}")
    return " ".join(settings)


def as_overrides(tree: dict[str, Any], path: str) -> Iterator[str]:
    """`parallel.strategy=fsdp`, as on the command line."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from as_overrides(value, f"{path}.{name}")
        else:
            yield f"{path}.{name}={value if isinstance(value, str) else json.dumps(value)}"


def in_gib(size: float) -> str:
    """`1.25 GiB`, `12 MiB`"""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.0f} MiB" if size >= 10 * 2**20 else f"{size / 2**20:.1f} MiB"


def weigh_all(recipe: Recipe, profile_of: ProfileOf, memory: int | None, on_gpu: bool) -> tuple[list[Outcome], Choice]:
    """Every option, and the one that `auto` takes."""
    recompute = recipe.train.activation_checkpointing
    options = [option for option in options_of(recipe) if on_gpu or option.is_own or option.name != "fsdp, offloaded"]
    outcomes = [weigh(recipe, option, profile_of, memory, on_gpu, recompute) for option in options]

    def recomputed(option: Option) -> Outcome:
        return weigh(recipe, option, profile_of, memory, on_gpu, recompute=True)

    return outcomes, choose(outcomes, memory, recomputed, isinstance(recipe.train.micro_batch, int))


def settings_of(option: Option) -> dict[str, Any]:
    """What a recipe's parallel section must say, but for defaults and what is for other strategies; for JSON."""
    unused = set(unused_sections(option.parallel))
    return option.parallel.model_dump(mode="json", exclude_defaults=True, exclude=unused)


def records(outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    """For JSON."""
    for outcome in outcomes:
        option = outcome.option
        record: dict[str, Any] = {"name": option.name, "parallel": settings_of(option), "is_own": option.is_own}
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
