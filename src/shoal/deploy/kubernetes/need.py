"""What a recipe's workers need, as `shoal plan` foresees it."""

from shoal.core.errors import UserError
from shoal.deploy.kubernetes.values import Need
from shoal.recipe.schema import Recipe
from shoal.train.forecast import forecast

_HUGE = 1 << 50
"""Memory of a device whose size is not known: then all fits, and what it takes is told."""


def need_of(recipe: Recipe, of_gpu: int | None) -> tuple[Need, list[str]]:
    """What a worker needs, and what the user should know about it."""
    on_gpu = bool(recipe.cluster.gpus_per_worker)
    outcome = forecast(recipe, of_gpu if on_gpu and of_gpu is not None else _HUGE, on_gpu).own
    if outcome.problem is not None:
        raise UserError(f"parallel.strategy: {outcome.option.label} is not possible: {outcome.problem}")
    warnings = []
    if not outcome.fits:
        warnings.append(
            f"{outcome.option.label} does not fit into the GPU's memory as the recipe stands; see shoal plan"
        )
    return Need(outcome.memory.total, outcome.memory.host, on_gpu), warnings
