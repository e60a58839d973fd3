"""Going through the validation set, every sample exactly once."""

import math
from collections.abc import Callable, Iterable

import torch

from shoal.core.batch import MicroBatch
from shoal.core.errors import RunError
from shoal.core.rng import isolated_rng
from shoal.parallel.unit import TrainUnit
from shoal.recipe.schema import Recipe


def evaluate(
    unit: TrainUnit, batches: Iterable[MicroBatch], stop: Callable[[], str | None], seed: int
) -> dict[str, float] | None:
    """Every metric over all of `batches`, weighted by what it counts; None when stopped in the middle."""
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}
    # Module by module: one that the user has frozen in evaluation mode must not come back training.
    training = [module for module in unit.model.modules() if module.training]
    unit.model.eval()
    try:
        with isolated_rng(seed, unit.device):
            for batch in batches:
                if stop() is not None:
                    return None
                for name, (value, count) in unit.evaluate(batch).items():
                    # In double: a sum over a million samples keeps its last digits.
                    sums[name] = sums.get(name, 0.0) + torch.as_tensor(value).double()
                    counts[name] = counts.get(name, 0.0) + torch.as_tensor(count).double()
    finally:
        for module in training:
            module.training = True
    return {name: float(sums[name] / counts[name]) for name in sums}


def named_for_validation(metrics: dict[str, float], items: str) -> dict[str, float]:
    """`loss` -> `val_loss`; where tokens are predicted, perplexity besides."""
    named = {f"val_{name}": value for name, value in metrics.items()}
    if items == "tokens" and "val_loss" in named:
        named["val_perplexity"] = math.exp(min(named["val_loss"], 700.0))
    return named


def check_watched(recipe: Recipe, metrics: dict[str, float]) -> None:
    """Raise unless the metrics that the recipe goes by are among those that there are."""
    watched = {"checkpoint.metric": recipe.checkpoint.metric}
    watched["early_stop.metric"] = recipe.early_stop.metric if recipe.early_stop else None
    for name, metric in watched.items():
        if metric is not None and metric not in metrics:
            raise RunError(f"{name}: {metric!r} is not reported by this task; it reports {', '.join(sorted(metrics))}")
