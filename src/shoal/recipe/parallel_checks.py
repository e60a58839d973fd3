"""Combinations of strategy, model and workers that cannot work: the reason, and the nearest that does."""

from collections.abc import Iterator

from shoal.models.section import Gpt, Vit
from shoal.parallel.deepspeed_config import Decided, build_config, precision_said, read_file
from shoal.parallel.degrees import Degrees, DegreesError, find_degrees
from shoal.parallel.section import ParallelSection
from shoal.recipe.schema import Recipe

Found = Iterator[tuple[tuple[str, ...], str]]

_OF_DDP = {
    **{"compress": "none", "hierarchical": False, "sync_every": 1, "sync_batch_norm": False},
    **{"find_unused_parameters": False, "static_graph": False, "gradient_as_bucket_view": True},
}
"""Fields that no other strategy has, and what they are when they do nothing."""

_OF_ONE_STRATEGY = ("fsdp", "deepspeed", "pipeline", "tensor")


def num_shares(recipe: Recipe) -> int | None:
    """Into how many shares a step's samples are divided; None where the workers cannot be divided as asked."""
    try:
        return find_degrees(recipe.parallel, recipe.parallel.strategy, recipe.cluster.workers).data
    except DegreesError:
        return None


def parallel_problems(recipe: Recipe) -> Found:
    """(path, message) for every such combination."""
    parallel, workers = recipe.parallel, recipe.cluster.workers
    strategy = parallel.strategy
    if strategy == "single" and workers > 1:
        yield (
            ("cluster", "workers"),
            f"{workers} workers are not possible with parallel.strategy single; set 1, or strategy ddp",
        )
    try:
        degrees = find_degrees(parallel, strategy, workers)
    except DegreesError as error:
        yield ("parallel", *error.field), str(error)
        return
    if strategy in ("pipeline", "tensor"):
        yield from _divided_problems(recipe, degrees)
    if strategy not in ("auto", "ddp"):
        for field, off in _OF_DDP.items():
            if getattr(parallel, field) != off:
                yield ("parallel", field), f"is for parallel.strategy ddp, but that is {strategy}; drop one of them"
    if strategy == "deepspeed":
        yield from _deepspeed_problems(recipe)
    if recipe.cluster.min_workers is not None:
        yield from _elastic_problems(recipe)


def unused_sections(parallel: ParallelSection) -> list[str]:
    """The sections of other strategies than its own."""
    used = {parallel.strategy}
    if parallel.strategy == "tensor" and parallel.tensor.across == "fsdp":
        used.add("fsdp")
    return [name for name in _OF_ONE_STRATEGY if name not in used]


def idle_settings(parallel: ParallelSection) -> Iterator[str]:
    """What of a recipe is said for other strategies than its own, which somebody may think to have."""
    strategy = parallel.strategy
    if strategy == "auto":
        return
    for name in unused_sections(parallel):
        for field in getattr(parallel, name).model_dump(exclude_defaults=True):
            yield f"parallel.{name}.{field}: is not used, because parallel.strategy is {strategy}"
    pipeline = parallel.pipeline
    is_said = "stages_per_worker" in pipeline.model_dump(exclude_defaults=True)
    if strategy == "pipeline" and pipeline.schedule != "interleaved" and is_said:
        yield f"parallel.pipeline.stages_per_worker: is for schedule interleaved, and not used by {pipeline.schedule}"


def check_ds_config(recipe: Recipe) -> None:
    """A `UserError` for a ds_config.json that cannot be read, or says otherwise than the recipe."""
    section = recipe.parallel.deepspeed
    if recipe.parallel.strategy != "deepspeed" or section.config is None:
        return
    read_file(section.config)
    workers, precision = recipe.cluster.workers, recipe.train.precision
    if recipe.train.micro_batch == "auto" or recipe.cluster.min_workers is not None:
        return  # what it must agree with is not known before the workers have met
    # Nor are the sizes of the model, which only make defaults of what is left open.
    decided = Decided(
        section=section,
        optim=recipe.optim,
        precision=precision if precision != "auto" else precision_said(section.config) or "fp32",
        clip_norm=recipe.train.clip_norm,
        global_batch=recipe.train.global_batch,
        micro_batch=recipe.micro_batch(workers),
        workers=workers,
        num_elements=1,
        largest=1,
    )
    build_config(decided)


def _divided_problems(recipe: Recipe, degrees: Degrees) -> Found:
    """A model must say how it is cut into stages, or how its layers are divided; of our own, gpt and vit do."""
    strategy, model, workers = recipe.parallel.strategy, recipe.model, recipe.cluster.workers
    if workers == 1:
        yield ("parallel", "strategy"), f"{strategy} divides a model among workers, and there is one; use single"
        return
    if strategy == "pipeline" and degrees.stages == 1:
        least = next(size for size in range(2, workers + 1) if not workers % size)
        yield ("parallel", "pipeline", "stages"), f"a pipeline of one worker is none; set {least} or more, or use ddp"
        return
    if model is None or ":" in model.name:  # what it can do shows when it is built
        return
    if not isinstance(model, Gpt | Vit):
        yield (
            ("parallel", "strategy"),
            f"{strategy} needs a model with repeated blocks, which {model.name} has not; possible with it: ddp, fsdp, "
            "deepspeed; possible with this strategy: gpt, vit, your own",
        )
        return
    if degrees.tensor > 1 and model.heads % degrees.tensor:
        sizes = [size for size in range(2, degrees.tensor) if not model.heads % size and not workers % size]
        best = f"set parallel.tensor.size={sizes[-1]}" if sizes else "use fsdp"
        yield (
            ("parallel", "tensor", "size"),
            f"{degrees.tensor} workers cannot share the {model.heads} heads of model.heads evenly; {best}, or make "
            f"model.heads a multiple of {degrees.tensor}",
        )
    per_worker = recipe.parallel.pipeline.stages_per_worker if recipe.parallel.pipeline.schedule == "interleaved" else 1
    if strategy == "pipeline" and model.layers < degrees.stages * per_worker:
        needed = f"{degrees.stages} workers of a pipeline"
        if per_worker > 1:
            needed += f" with {per_worker} stages each (schedule interleaved)"
        sizes = [size for size in range(2, degrees.stages) if size * per_worker <= model.layers and not workers % size]
        best = f"set parallel.pipeline.stages={sizes[-1]}" if sizes else "use fsdp"
        yield (
            ("parallel", "pipeline", "stages"),
            f"{needed} need as many blocks, and model.layers is {model.layers}; {best}, or more layers",
        )


def _deepspeed_problems(recipe: Recipe) -> Found:
    section = recipe.parallel.deepspeed
    if section.offload_params != "none" and section.stage < 3:
        what = f"is for stage 3, where weights are divided, but parallel.deepspeed.stage is {section.stage}; set 3"
        yield ("parallel", "deepspeed", "offload_params"), what
    if section.offload_optimizer == "nvme" and section.stage < 3:
        what = f"nvme is for stage 3, but parallel.deepspeed.stage is {section.stage}; set 3, or offload to cpu"
        yield ("parallel", "deepspeed", "offload_optimizer"), what
    if "nvme" in (section.offload_optimizer, section.offload_params) and section.nvme_dir is None:
        yield ("parallel", "deepspeed", "nvme_dir"), "is required by offloading to nvme: a folder on a fast disk"
    if section.stage == 3 and recipe.train.compile is True:
        yield (
            ("train", "compile"),
            "does not go with stage 3 of parallel.deepspeed, which gathers weights in hooks that a compiled model does "
            "not run; turn it off, or use stage 2 or fsdp",
        )


def _elastic_problems(recipe: Recipe) -> Found:
    parallel = recipe.parallel
    if parallel.strategy in ("pipeline", "tensor"):
        what = f"workers come and go one by one, which {parallel.strategy} cannot; give one number, or use fsdp or ddp"
        yield ("cluster", "min_workers"), what
    elif parallel.strategy == "fsdp" and parallel.fsdp.shard_size is not None:
        what = "workers come and go one by one, and parallel.fsdp.shard_size needs groups of them; drop one of the two"
        yield ("cluster", "min_workers"), what
