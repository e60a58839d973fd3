"""Reading YAML the way people write it, with the line of every value kept for error messages."""

import re
from pathlib import Path as FilePath
from typing import Any

import yaml

from shoal.core.errors import UserError

Path = tuple[str, ...]
"""Where in a recipe a value stands: ("optim", "lr")."""

Tree = dict[str, Any]


def dotted(path: Path) -> str:
    """`optim.lr`, as an error message names a field; characters that would garble a terminal are escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in ".".join(path))


class _Loader(yaml.SafeLoader):
    """YAML with numbers and words as people expect them.

    3e-4 is a number, 010 is ten, 12:30 is a word, and so are yes, no, on and off.
    """


_OWN = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OWN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)).replace("_", ""))


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around a text that `_Loader` would otherwise read as something else: '1e3'."""


_Dumper.yaml_implicit_resolvers = {
    first: _Loader.yaml_implicit_resolvers.get(first, []) + yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])
    for first in _Loader.yaml_implicit_resolvers | yaml.SafeDumper.yaml_implicit_resolvers
}


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Other quotes would let some line breaks through as they are (U+0085), to be read back as another.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)


def to_yaml(tree: Tree) -> str:
    """The tree as YAML that `read_yaml`, and any other reader, reads back as it was."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(file: FilePath) -> tuple[Tree, dict[Path, str]]:
    """The tree in a YAML file, and for each path in it `file, line N`."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {file}: cannot be read: {error}") from error
    try:
        node = yaml.compose(text, Loader=_Loader)
        lines: dict[Path, str] = {}
        if node is not None:
            if _size(node, {}) > _MOST_VALUES:
                raise UserError(f"recipe {file}: unfolds to more than {_MOST_VALUES:,} values by its aliases")
            _note_lines(node, (), file.name, lines)
        tree = yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        hint = '; put quotes around references: "${env:NAME}"' if re.search(r"[^\"']\$\{", text) else ""
        raise UserError(f"recipe {file}, line {line}: not valid YAML: {error.problem}{hint}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"recipe {file}: not valid YAML: {_first_line(error)}") from error
    if tree is None:
        raise UserError(f"recipe {file}: is empty")
    if not isinstance(tree, dict):
        raise UserError(f"recipe {file}: should be sections such as `train:`, but is a {type(tree).__name__}")
    return tree, lines


def parse_value(text: str, field: str) -> Any:
    """A value as it would be read from a YAML file."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{field}: {text!r} is not a valid YAML value: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


_MOST_VALUES = 100_000


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Values below a node with every alias written out; one that contains itself counts as nothing here."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 0
        below = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_size(part, known) for part in below)
    return known[id(node)]


def _note_lines(node: yaml.Node, path: Path, name: str, lines: dict[Path, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        here = (*path, str(key.value))
        if here in lines:
            raise UserError(
                f"{dotted(here)}: is given twice in {name}, the second time in line {key.start_mark.line + 1}"
            )
        lines[here] = f"{name}, line {key.start_mark.line + 1}"
        _note_lines(value, here, name, lines)
