"""Laying recipes over one another, and `key=value` over all of them."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

from shoal.core.errors import UserError
from shoal.observe.track.section import SINKS
from shoal.recipe.schema import NAMED_SECTIONS
from shoal.recipe.yaml_tree import Path, Tree, parse_value

_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_SWITCHES = frozenset(("track", name) for name in SINKS)
"""Sections that `true` switches on."""


def is_override(argument: str) -> bool:
    """Whether a command-line word is `key=value` rather than a recipe."""
    key, equals, _ = argument.partition("=")
    return bool(equals) and "/" not in key and not key.endswith((".yaml", ".yml"))


def parse_overrides(arguments: Iterable[str]) -> dict[Path, Any]:
    """`optim.lr=3e-4` and the like, by path; a later one wins."""
    overrides: dict[Path, Any] = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        if not _KEY.fullmatch(key):
            raise UserError(f"{argument!r}: an override looks like section.field=value, for example optim.lr=3e-4")
        overrides[tuple(key.split("."))] = parse_value(text, key)
    return overrides


def plain(value: Any) -> Any:
    """What Python code hands over, as a YAML file would hold it."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, FilePath) else value


def override_paths(overrides: Iterable[str] | Mapping[str, Any]) -> dict[Path, Any]:
    """Overrides by path, given as `key=value` words or as a mapping of dotted keys."""
    words = [overrides] if isinstance(overrides, str) else list(overrides)
    if wrong := [word for word in words if not isinstance(word, str)]:
        raise UserError(f"overrides: {wrong[0]!r} should be text such as optim.lr")
    if isinstance(overrides, Mapping):
        return {tuple(key.split(".")): plain(value) for key, value in overrides.items()}
    return parse_overrides(words)


def overlay_of(overrides: Mapping[Path, Any]) -> Tree:
    """The overrides as one tree, so that they merge together, in whatever order they were given."""
    tree: Tree = {}
    for path, value in sorted(overrides.items(), key=lambda item: len(item[0])):
        here: Tree = tree
        for depth, part in enumerate(path[:-1]):
            below = here.setdefault(part, {})
            if isinstance(below, str) and depth == 0 and part in NAMED_SECTIONS:
                below = here[part] = {"name": below}
            if below is True and path[: depth + 1] in _SWITCHES:
                below = here[part] = {}  # on, with this field
            if not isinstance(below, dict):
                outer = f"{'.'.join(path[: depth + 1])}={json.dumps(below, default=str)}"
                raise UserError(f"{'.'.join(path)}: cannot be set inside {outer}; leave out one of the two")
            here = below
        here[path[-1]] = value
    return tree


def merge(base: Tree, over: Tree) -> Tree:
    """`over` laid on `base`: sections merge field by field, all else is replaced.

    A task, model or data section with another `name` replaces the one below it whole, because its fields differ.
    """
    base, over = _name_sections(base), _name_sections(over)
    merged = dict(base)
    for key, value in over.items():
        below = base.get(key)
        if not isinstance(value, dict) or not isinstance(below, dict) or _is_another(key, below, value):
            merged[key] = value
        else:
            below = _without_replaced_length(below, value) if key == "train" else below
            merged[key] = _merge_section(below, _without_switches(below, value) if key == "track" else value)
    return merged


def _is_another(key: str, base: Tree, over: Tree) -> bool:
    return key in NAMED_SECTIONS and over.get("name", base.get("name")) != base.get("name")


def _without_replaced_length(base: Tree, over: Tree) -> Tree:
    """`train.steps` laid over `train.epochs` replaces it, and the other way round: they say the same thing."""
    for given, other in (("steps", "epochs"), ("epochs", "steps")):
        if over.get(given) is not None and other not in over:
            base = {key: value for key, value in base.items() if key != other}
    return base


def _without_switches(base: Tree, over: Tree) -> Tree:
    """`track.mlflow=true` laid over its fields leaves them as they are: it is on already."""
    return {key: value for key, value in over.items() if value is not True or not isinstance(base.get(key), dict)}


def _name_sections(tree: Tree) -> Tree:
    named = {key: {"name": tree[key]} for key in NAMED_SECTIONS if isinstance(tree.get(key), str)}
    return tree | named


def _merge_section(base: Tree, over: Tree) -> Tree:
    both = base | over
    for key, value in over.items():
        below = base.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            both[key] = _merge_section(below, value)
    return both
