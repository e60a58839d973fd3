"""`${env:NAME}`: values that come from the environment or a .env file and never stand in a recipe."""

import os
import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from dotenv import dotenv_values

from shoal.core.errors import UserError
from shoal.recipe.yaml_tree import Path, Tree, dotted, parse_value

_REFERENCE = re.compile(r"\$\{env:([^}]*)\}")
_TELLING = 6
"""Texts shorter than this stand in messages by chance."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def environment(folder: FilePath | None = None) -> dict[str, str]:
    """The process environment over the .env file of `folder` (the working directory)."""
    file = (folder or FilePath.cwd()) / ".env"
    try:
        values = dotenv_values(file, interpolate=False) if file.is_file() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {type(error).__name__}; write NAME=value lines in UTF-8") from None
    return {name: value for name, value in values.items() if value is not None} | dict(os.environ)


def names_in(tree: Tree) -> set[str]:
    """The variables that its references name."""
    return {name for name in _REFERENCE.findall(str(tree)) if _NAME.fullmatch(name)}


def resolve_references(tree: Tree, values: Mapping[str, str], as_text: bool = False) -> tuple[Tree, dict[Path, str]]:
    """The tree with every reference replaced, and what stood at each replaced path.

    A value that is one reference alone is read as YAML would read it, so that numbers are numbers; not with `as_text`.
    """
    references: dict[Path, str] = {}
    return _resolve(tree, (), values, references, as_text), references


def _resolve(value: Any, path: Path, values: Mapping[str, str], references: dict[Path, str], as_text: bool) -> Any:
    if isinstance(value, dict):
        return {key: _resolve(item, (*path, str(key)), values, references, as_text) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(item, (*path, str(i)), values, references, as_text) for i, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    field = dotted(path)
    for match in re.finditer(r"\$\{([^}]*)\}?", value):
        if not match.group(1).startswith("env:") or not match.group(0).endswith("}"):
            raise UserError(f"{field}: {match.group(0)!r} is not a reference; write ${{env:NAME}}")

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if not _NAME.fullmatch(name):
            raise UserError(f"{field}: {match.group(0)!r} does not name an environment variable; write ${{env:NAME}}")
        if name not in values:
            raise UserError(f"{field}: environment variable {name} is not set; export it or put {name}=... in .env")
        return values[name]

    references[path] = value
    text = _REFERENCE.sub(replace, value)
    return _read(text) if _REFERENCE.fullmatch(value) and not as_text else text


def _read(text: str) -> Any:
    try:
        return parse_value(text, "")
    except UserError:
        return text  # a password such as `@x` or `a: b: c`; the message would have shown it


def restore_references(tree: Tree, references: Mapping[Path, str]) -> Tree:
    """The tree with the references put back where they stood."""
    return {key: _restore(item, (key,), references) for key, item in tree.items()}


def _restore(value: Any, path: Path, references: Mapping[Path, str]) -> Any:
    if path in references:
        return references[path]
    if isinstance(value, dict):
        return {key: _restore(item, (*path, str(key)), references) for key, item in value.items()}
    if isinstance(value, list):
        return [_restore(item, (*path, str(number)), references) for number, item in enumerate(value)]
    return value


def hide_values(message: str, tree: Tree, references: Mapping[Path, str]) -> str:
    """The message with references in place of the texts that they stand for, quoted or of some length."""
    for path, reference in references.items():
        value: Any = tree
        for part in path:
            items = enumerate(value) if isinstance(value, list) else value.items()
            value = next(item for key, item in items if str(key) == part)
        if isinstance(value, str):
            message = message.replace(repr(value), reference)
        if len(str(value)) >= _TELLING and not isinstance(value, dict | list):
            message = message.replace(str(value), reference)
    return message
