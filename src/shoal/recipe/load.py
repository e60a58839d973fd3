"""From files, overrides and the environment to a checked recipe."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from shoal.core.errors import UserError
from shoal.core.secrets import scrub
from shoal.core.section import one_of
from shoal.core.storage import expand_home
from shoal.recipe.checks import problems
from shoal.recipe.merge import merge, overlay_of, override_paths, plain
from shoal.recipe.messages import describe, user_path
from shoal.recipe.references import environment, hide_values, names_in, resolve_references, restore_references
from shoal.recipe.schema import Recipe
from shoal.recipe.yaml_tree import Path, Tree, dotted, read_yaml, to_yaml

DEFAULT_RECIPE = "digits"


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and the `${env:NAME}` references that stand where its values came from the environment."""

    recipe: Recipe
    references: Mapping[Path, str] = field(default_factory=dict)
    values: Tree = field(default_factory=dict, repr=False, compare=False)
    """The tree with references resolved; for `hide` alone."""

    def hide(self, message: str) -> str:
        """The message with references in place of the texts that they stand for, and without passwords and tokens."""
        return scrub(hide_values(message, self.values, self.references))

    def tree(self) -> Tree:
        """Fully resolved but for the references: what may be written down."""
        return restore_references(self.recipe.model_dump(mode="json"), self.references)

    def to_yaml(self) -> str:
        """The tree as YAML."""
        return to_yaml(self.tree())


def shipped_recipes() -> dict[str, str]:
    """name -> first comment line, of the recipes that come with Shoal."""
    folder = resources.files("shoal.recipe") / "shipped"
    names = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return {name: _first_comment((folder / f"{name}.yaml").read_text(encoding="utf-8")) for name in names}


def _first_comment(text: str) -> str:
    return text.splitlines()[0].removeprefix("#").strip()


def load_recipe(
    sources: Sequence[str | FilePath | Mapping[str, Any]] = (),
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    is_elsewhere: bool = False,
) -> LoadedRecipe:
    """Read each source (a shipped name, a file, a mapping), lay them over one another, then the overrides, and check.

    Raises `UserError` with one line for each thing that is wrong. With `is_elsewhere` the run will have variables that
    are not set here: some text stands for them, and the recipe is not for training here.
    """
    tree: Tree = {}
    origins: dict[Path, str] = {}
    for number, source in enumerate(sources or (DEFAULT_RECIPE,)):
        layer, lines, stem = _read(source)
        if number == 0 and stem is not None:
            tree["name"] = stem
        tree = merge(tree, layer)
        origins |= lines
    by_path = override_paths(overrides)
    tree = merge(tree, overlay_of(by_path))
    return check_tree(tree, origins_with(origins, by_path), is_elsewhere=is_elsewhere)


def origins_with(origins: Mapping[Path, str], overrides: Iterable[Path]) -> dict[Path, str]:
    """Where each value came from, once overrides are laid over it and all below them."""
    replaced = tuple(overrides)
    kept = {path: origin for path, origin in origins.items() if not any(path[: len(o)] == o for o in replaced)}
    return kept | dict.fromkeys(replaced, "override")


def check_tree(tree: Tree, origins: Mapping[Path, str] | None = None, *, is_elsewhere: bool = False) -> LoadedRecipe:
    """The recipe that a tree describes, or a `UserError` that says all that is wrong with it."""
    known = environment()
    if is_elsewhere:
        known = {name: f"set-elsewhere-{name}" for name in names_in(tree)} | known
    try:
        values, references = resolve_references(tree, known)
        texts, _ = resolve_references(tree, known, as_text=True)
    except RecursionError:
        raise UserError("recipe: refers to itself by a YAML anchor; write it out") from None
    try:
        recipe = _validate(values, texts)
    except ValidationError as error:
        raise UserError(describe(error, references, origins or {})) from None
    if found := problems(recipe):
        message = "\n".join(f"{dotted(path)}: {message}" for path, message in found)
        raise UserError(hide_values(message, values, references))
    return LoadedRecipe(recipe, references, values)


def _validate(values: Tree, texts: Tree) -> Recipe:
    """`values`, but where text is asked for and a reference gave a number, as it stood in the environment."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False):
            if detail["type"] == "string_type":
                values = _with_text(values, texts, user_path(detail["loc"]))
    return Recipe.model_validate(values)


def _with_text(values: Any, texts: Any, path: Path) -> Any:
    if not path:
        return texts
    if isinstance(values, dict):
        return {k: _with_text(v, texts[k], path[1:]) if str(k) == path[0] else v for k, v in values.items()}
    if isinstance(values, list):
        return [_with_text(v, texts[i], path[1:]) if str(i) == path[0] else v for i, v in enumerate(values)]
    return values


def _read(source: str | FilePath | Mapping[str, Any]) -> tuple[Tree, dict[Path, str], str | None]:
    """A source's tree, the line of each value in it, and the name that a run of it gets unless it says otherwise."""
    if isinstance(source, Mapping):
        return plain(source), {}, None
    if not isinstance(source, str | FilePath):
        raise UserError(f"recipe {source!r}: should be a name, a path or a mapping, not a {type(source).__name__}")
    file = expand_home(source)
    if file.is_file():
        tree, lines = read_yaml(file)
        name = file.stem
    elif str(source) in shipped_recipes():
        with resources.as_file(resources.files("shoal.recipe") / "shipped" / f"{source}.yaml") as shipped:
            tree, lines = read_yaml(shipped)
        name = str(source)
    elif file.is_dir():
        raise UserError(
            f"recipe {str(source)!r}: is a folder; give a .yaml file or one of {', '.join(shipped_recipes())}"
        )
    elif "/" in str(source) or file.suffix in (".yaml", ".yml"):
        raise UserError(f"recipe {str(source)!r}: no such file")
    else:
        raise UserError(
            f"recipe {str(source)!r}: neither a file here nor a recipe that ships with Shoal; "
            f"{one_of(str(source), shipped_recipes())}"
        )
    return tree, lines, re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "run"
