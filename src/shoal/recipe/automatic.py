"""What a recipe leaves to the device: the numerics that are `auto`. Loads without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shoal.models.section import CustomModel, Gpt, Mlp, ResNet, SimpleCnn, Vit
from shoal.parallel.deepspeed_config import precision_said
from shoal.recipe.schema import Recipe
from shoal.tasks.section import CustomTask

_TRIED = (Mlp, SimpleCnn, ResNet, Vit, Gpt)
"""What is compiled and recorded unasked. Not lstm: its layers are one kernel each already, which torch.compile only
goes around, and whether those can be recorded nobody has tried."""
_CONVOLVING = (SimpleCnn, ResNet)
_COMPILES_AS_A_WHOLE = ("auto", "single", "ddp")
"""Strategies; in the others what lies between the blocks is not compiled, and whether it pays depends."""


@dataclass(frozen=True)
class Hardware:
    """What a worker computes on, as far as defaults go by it."""

    is_gpu: bool
    has_bf16: bool = True
    can_compile: bool = True
    """Whether what torch.compile needs is there."""

    @staticmethod
    def common(workers: Sequence["Hardware"]) -> "Hardware":
        """What all workers have, who must compute alike."""
        return Hardware(
            all(worker.is_gpu for worker in workers),
            all(worker.has_bf16 for worker in workers),
            all(worker.can_compile for worker in workers),
        )


CPU = Hardware(is_gpu=False)
GPU = Hardware(is_gpu=True)


def with_numerics(recipe: Recipe, hardware: Hardware) -> Recipe:
    """The recipe with nothing of its numerics left open, but for what a strategy decides that is open itself."""
    train = recipe.train
    is_shipped = recipe.model is not None and not isinstance(recipe.model, CustomModel)
    is_shipped = is_shipped and not isinstance(recipe.task, CustomTask)
    on_gpu = hardware.is_gpu and is_shipped
    precision = train.precision
    if precision == "auto":
        precision = _said_elsewhere(recipe) or ("bf16" if hardware.is_gpu and hardware.has_bf16 else "fp32")
    changes: dict[str, Any] = {
        "precision": precision,
        "compile": _or(train.compile, _gains_by_compiling(recipe, on_gpu and hardware.can_compile)),
        "channels_last": _or(train.channels_last, is_shipped and isinstance(recipe.model, _CONVOLVING)),
        # fp16 asks the host after every step whether its scale was too large.
        "cuda_graphs": _or(train.cuda_graphs, "auto" if _can_record(recipe, on_gpu, precision) else False),
    }
    return recipe.model_copy(update={"train": train.model_copy(update=changes)})


def _said_elsewhere(recipe: Recipe) -> Any:
    """The precision of a ds_config.json, where there is one that says."""
    parallel = recipe.parallel
    if parallel.strategy != "deepspeed" or parallel.deepspeed.config is None:
        return None
    return precision_said(parallel.deepspeed.config)


def _gains_by_compiling(recipe: Recipe, can_compile: bool) -> bool | Literal["auto"]:
    if not can_compile or not isinstance(recipe.model, _TRIED):
        return False
    if recipe.parallel.strategy == "auto" and recipe.cluster.workers > 1:
        return "auto"  # until there is a strategy
    parallel = recipe.parallel
    if recipe.cluster.workers > 1 and (
        parallel.bucket_mb < 1 or parallel.static_graph or parallel.find_unused_parameters
    ):
        return False  # what torch.compile does not go together with, or nobody has tried
    return recipe.parallel.strategy in _COMPILES_AS_A_WHOLE


def _can_record(recipe: Recipe, on_gpu: bool, precision: str) -> bool:
    is_alone = recipe.cluster.workers == 1 and recipe.parallel.strategy in ("auto", "single")
    return on_gpu and is_alone and precision != "fp16" and isinstance(recipe.model, _TRIED)


def _or(value: Any | Literal["auto"], found: Any) -> Any:
    return found if value == "auto" else value
