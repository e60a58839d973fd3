"""What of a recipe may not change when a run is resumed."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from shoal.recipe.schema import Recipe

_FREE_DATA = {"dir", "workers", "download"}


def fixed_fields(recipe: Recipe) -> dict[str, str]:
    """Dotted field -> hash of its value. Hashes, because values may have come from the environment."""
    parts = {
        "task": recipe.task.model_dump(mode="json"),
        "model": recipe.model.model_dump(mode="json") if recipe.model is not None else None,
        "data": recipe.data.model_dump(mode="json", exclude=_FREE_DATA) if recipe.data is not None else None,
        "optim": {"name": recipe.optim.name},
        "train": {"global_batch": recipe.train.global_batch, "seed": recipe.train.seed},
    }
    return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in _leaves(parts, "")}


def changed_field(before: dict[str, str], after: dict[str, str]) -> str | None:
    """A field that is not the same in both, the name of a section first."""
    changed = [name for name in sorted(before | after) if before.get(name) != after.get(name)]
    return min(changed, key=lambda name: not name.endswith(".name"), default=None)


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
