"""What of a recipe may not change when a run is resumed."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from shoal.core.section import Section
from shoal.recipe.schema import Recipe

_FREE_DATA = {
    *("dir", "workers", "download", "on_error", "transform_on", "resident"),
    *("cache_dir", "cache_gb", "patience_s"),
}
_LATER_DATA = ("loader", "tokenizer", "window", "lanes", "mixup", "cutmix", "image", "label", "classes")
"""Fields that earlier versions had not: at their defaults they are as good as absent, so that their runs go on."""


def fixed_fields(recipe: Recipe) -> dict[str, str]:
    """Dotted field -> hash of its value. Hashes, because values may have come from the environment."""
    parts = {
        "task": recipe.task.model_dump(mode="json"),
        "model": recipe.model.model_dump(mode="json") if recipe.model is not None else None,
        "data": _fixed_data(recipe.data) if recipe.data is not None else None,
        "optim": {"name": recipe.optim.name},
        "train": {"global_batch": recipe.train.global_batch, "seed": recipe.train.seed},
    }
    return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in _leaves(parts, "")}


def _fixed_data(section: Section) -> dict[str, Any]:
    fields = type(section).model_fields
    free = _FREE_DATA | {
        name for name in _LATER_DATA if name in fields and getattr(section, name) == fields[name].default
    }
    return section.model_dump(mode="json", exclude=free)


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
