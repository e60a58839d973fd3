"""A recipe as each strategy and number of workers has it, and what of it decides what is sent."""

from typing import Any

from shoal.bench.comm import SMALL_VIT
from shoal.bench.simulate_plan import Rules
from shoal.core.process import choose_device
from shoal.recipe.automatic import with_numerics
from shoal.recipe.load import LoadedRecipe, load_recipe
from shoal.recipe.schema import Recipe
from shoal.train.hardware import hardware_of

_PLAIN = {
    "parallel.strategy": "ddp",
    "parallel.compress": "none",
    "parallel.hierarchical": False,
    "parallel.sync_every": 1,
    "parallel.fsdp.shard_size": None,
    "parallel.fsdp.cpu_offload": False,
    "parallel.powersgd_start_step": 2,
    "cluster.min_workers": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "single": {"parallel.strategy": "single"},
    "ddp": {},
    "fsdp": {"parallel.strategy": "fsdp"},
    "hsdp": {"parallel.strategy": "fsdp"},
    "ddp_bf16": {"parallel.compress": "bf16"},
    "ddp_fp16": {"parallel.compress": "fp16"},
    "ddp_powersgd": {"parallel.compress": "powersgd"},
}


SIMULATED: dict[str, Any] = SMALL_VIT | {"train": {"steps": 1, "global_batch": 8}}
"""Where no recipe is given: 6.4 million weights, 8 samples a worker."""


def batch_per_worker(recipe: Recipe) -> int:
    """Samples of a step that are one worker's: as many stay with each, however many workers there are."""
    batch, workers = recipe.train.global_batch, recipe.cluster.workers
    assert batch % workers == 0, "recipes are checked for that"
    return batch // workers


def recipe_for(loaded: LoadedRecipe, strategy: str, workers: int, on_node: int = 1, **others: Any) -> LoadedRecipe:
    """The recipe under a strategy, with the batch of a worker as it is."""
    batch = batch_per_worker(loaded.recipe)
    overrides: dict[str, Any] = _PLAIN | _OWN[strategy]
    overrides |= {
        "cluster.workers": workers,
        "train.global_batch": batch * workers,
        "train.micro_batch": min(batch, loaded.recipe.micro_batch(loaded.recipe.cluster.workers)),
    }
    if strategy == "hsdp":
        overrides["parallel.fsdp.shard_size"] = on_node
    return load_recipe([loaded.tree()], overrides | others)


def one_micro_batch(loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe of one process that computes one micro-batch a step."""
    micro = min(batch_per_worker(loaded.recipe), loaded.recipe.micro_batch(loaded.recipe.cluster.workers))
    return recipe_for(loaded, "single", 1, **{"train.global_batch": micro, "train.micro_batch": micro})


def rules_of(loaded: LoadedRecipe) -> Rules:
    """What of a recipe decides what is sent."""
    recipe = with_numerics(loaded.recipe, hardware_of(choose_device(loaded.recipe.cluster.gpus_per_worker)))
    parallel, fsdp = recipe.parallel, recipe.parallel.fsdp
    gathered = recipe.train.precision if fsdp.param_dtype == "auto" else fsdp.param_dtype
    micro = min(batch_per_worker(recipe), recipe.micro_batch(recipe.cluster.workers))
    return Rules(
        bucket_mb=parallel.bucket_mb,
        powersgd_rank=parallel.powersgd_rank,
        gathered="fp32" if gathered == "tf32" else gathered,
        reduced=fsdp.reduce_dtype,
        gathers_again=fsdp.reshard_after_forward,
        reduces_each=fsdp.reduce_every_micro_batch,
        clips=recipe.train.clip_norm is not None,
        micro_batches=-(-batch_per_worker(recipe) // micro),
    )
