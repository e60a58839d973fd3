"""What a recipe's workers need, as `shoal plan` foresees it."""

from shoal.core.errors import UserError
from shoal.deploy.kubernetes.values import Need
from shoal.recipe.schema import Recipe
from shoal.train.forecast import forecast

_HUGE = 1 << 50
"""Memory of a device whose size is not known: then all fits, and what it takes is told."""


def need_of(recipe: Recipe, of_gpu: int | None) -> tuple[Need, list[str]]:
    """What a worker needs at most, and what the user should know about it: of fewer workers, each holds more.

    Raises:
        NoDataError: The model is sized by data that are not here; none are downloaded for this.
    """
    if recipe.data is not None and getattr(recipe.data, "download", False):
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"download": False})})
    cluster = recipe.cluster
    need, warnings = _need_of(recipe, of_gpu)
    if cluster.min_workers is not None and cluster.min_workers < cluster.workers:
        # `min_workers` stays: with it the batch need not be divided evenly.
        fewest = cluster.model_copy(update={"workers": cluster.min_workers})
        of_fewest, more = _need_of(recipe.model_copy(update={"cluster": fewest}), of_gpu)
        need = Need(max(need.device, of_fewest.device), max(need.host, of_fewest.host), need.on_gpu)
        warnings += [f"with {cluster.min_workers} workers {words}" for words in more if words not in warnings]
    return need, warnings


def _need_of(recipe: Recipe, of_gpu: int | None) -> tuple[Need, list[str]]:
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
