"""Going through the validation set, every sample exactly once."""

import math
from collections.abc import Callable, Iterable

import torch

from shoal.core.batch import MicroBatch
from shoal.core.errors import RunError
from shoal.core.group import Group
from shoal.core.rng import isolated_rng
from shoal.parallel.unit import TrainUnit
from shoal.recipe.schema import Recipe


def evaluate(
    unit: TrainUnit, batches: Iterable[MicroBatch], stop: Callable[[], str | None], seed: int, group: Group
) -> dict[str, float] | None:
    """Every metric over all workers' `batches`, weighted by what it counts; None when stopped in the middle."""
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
                measured = unit.evaluate(batch)
                if not batch.num_samples:
                    continue  # it stood in, so that every worker computes as often
                for name, (value, count) in measured.items():
                    # In double: a sum over a million samples keeps its last digits.
                    sums[name] = sums.get(name, 0.0) + torch.as_tensor(value).double()
                    counts[name] = counts.get(name, 0.0) + torch.as_tensor(count).double()
    finally:
        for module in training:
            module.training = True
    return _over_workers({name: (float(sums[name]), float(counts[name])) for name in sums}, group)


def _over_workers(measured: dict[str, tuple[float, float]], group: Group) -> dict[str, float]:
    """Mean of every metric; one that some workers had no samples for is that of the others."""
    parts = group.gather(measured)
    names = list(dict.fromkeys(name for part in parts for name in part))
    total = {name: sum(part[name][0] for part in parts if name in part) for name in names}
    count = {name: sum(part[name][1] for part in parts if name in part) for name in names}
    return {name: total[name] / count[name] if count[name] else math.nan for name in names}


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
