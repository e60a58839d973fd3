"""What each contender trains: the recipe, with nothing in it left to decide."""

from typing import Any

import torch

from shoal.recipe.automatic import with_numerics
from shoal.recipe.load import LoadedRecipe, check_tree
from shoal.recipe.merge import merge
from shoal.recipe.schema import Recipe
from shoal.train.hardware import hardware_of


def recipe_for(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe that Shoal itself trains with on this device."""
    return with_numerics(recipe, hardware_of(device))


def peer_precision(recipe: Recipe, device: torch.device) -> str:
    """What peers are told, who do not choose by themselves: bf16 where a GPU has it, unless the recipe says."""
    return recipe_for(recipe, device).train.precision


def with_data(loaded: LoadedRecipe, recipe: Recipe) -> LoadedRecipe:
    """The loaded recipe on the data of another."""
    assert recipe.data is not None
    tree: dict[str, Any] = {**loaded.tree(), "data": None}
    return check_tree(merge(tree, {"data": recipe.data.model_dump(mode="json")}))
