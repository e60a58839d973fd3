"""docs/recipe-reference.md: every field of a recipe in tables. `python -m shoal.recipe.field_tables FILE` writes it."""

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.section import CUSTOM
from shoal.recipe.json_schema import recipe_json_schema

Schema = Mapping[str, Any]

_INTRODUCTION = """\
# Every field of a recipe

Made from the code by `make schema`; a test fails where it has fallen behind. Two more places know the fields:

- `docs/recipe.schema.json`, the JSON Schema of a recipe. Editors complete and explain fields from it; see
  [recipes](recipes.md#in-an-editor).
- `shoal train RECIPE --dry-run`, which prints a recipe with every field of its sections written out, and stops.

A field is named by its path, in overrides and in messages: `parallel.fsdp.cpu_offload=true`. A mistyped one is answered
with the fields that its section has:

    $ shoal train digits optim.lrr=1
    error: optim.lrr: unknown key; did you mean optim.lr? (keys here: name, lr, weight_decay, ...) [override]

`task` and `train` are required; `model` and `data` are, unless your task brings its own. All else has defaults. `task`,
`model` and `data` may be given by their name alone: `model: vit`.
"""

_CHOSEN_BY_NAME = {
    "task": "What is learned.",
    "model": "Which model.",
    "data": "Which data.",
}
"""Sections whose other fields depend on their `name`; all others are described by their class."""

_TYPES = {
    "boolean": "`true`, `false`",
    "null": "`null`",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "object": "mapping",
}
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def to_text() -> str:
    """As it is kept in docs/recipe-reference.md."""
    schema = recipe_json_schema()
    classes: Schema = schema["$defs"]
    parts = [_INTRODUCTION, "\n".join(_contents(schema["properties"], classes)) + "\n"]
    for name, field in schema["properties"].items():
        alternatives = [classes[reference] for reference in _references(field)]
        if name in _CHOSEN_BY_NAME:
            parts += _alternatives(name, alternatives)
        elif alternatives:
            parts += _section(name, alternatives[0], classes)
    return "\n".join(parts)


def _contents(fields: Schema, classes: Schema) -> Iterator[str]:
    yield "| section | what it says |"
    yield "| --- | --- |"
    for name, field in fields.items():
        references = _references(field)
        if not references:
            yield f"| `{name}` | {_words(field)} |"
            continue
        about = _CHOSEN_BY_NAME.get(name)
        if about is None:
            absent = " Absent unless given." if field.get("default", ...) is None else ""
            about = _words(classes[references[0]]) + absent
        yield f"| [`{name}`](#{_anchor(name)}) | {about} |"


def _section(path: str, section: Schema, classes: Schema) -> Iterator[str]:
    """Its table, then those of the sections in it."""
    inside = {name: found[0] for name, field in section["properties"].items() if (found := _references(field))}
    yield f"## {path}\n\n{_words(section)}\n"
    yield field_table(section["properties"], section.get("required", []), path)
    for name, reference in inside.items():
        yield from _section(f"{path}.{name}", classes[reference], classes)


def _alternatives(path: str, sections: Sequence[Schema]) -> Iterator[str]:
    """What all have, then what each has besides."""
    every = [section["properties"] for section in sections]
    common = {name: field for name, field in every[0].items() if all(other.get(name) == field for other in every)}
    names = ", ".join(name for section in sections for name in _names(section))
    about = f"{_CHOSEN_BY_NAME[path]} The other fields depend on `name`: {names}."
    yield f"## {path}\n\n{textwrap.fill(about, 120, break_on_hyphens=False)}\n"
    if common:
        yield f"With every name:\n\n{field_table(common, [], path)}"
    for section in sections:
        fields = {name: field for name, field in section["properties"].items() if name not in {"name", *common}}
        yield f"### {path}: {', '.join(_names(section))}\n\n{_words(section)}\n"
        if fields:
            yield field_table(fields, section.get("required", []), path)


def _names(section: Schema) -> list[str]:
    name = section["properties"]["name"]
    known = [name["const"]] if "const" in name else name.get("enum", [CUSTOM])
    return [f"`{one}`" for one in known]


def field_table(fields: Schema, required: Sequence[str], path: str) -> str:
    """A line a field: its default, what is allowed, what it does."""
    lines = ["| field | default | allowed | what it does |", "| --- | --- | --- | --- |"]
    for name, field in fields.items():
        if _references(field):
            lines.append(f"| `{name}` | | [fields](#{_anchor(f'{path}.{name}')}) | {_words(field)} |")
            continue
        default = "required" if name in required else f"`{_value(field['default'])}`"
        lines.append(f"| `{name}` | {default} | {_allowed(field)} | {_words(field)} |")
    return "\n".join(lines) + "\n"


def _words(described: Schema) -> str:
    """What a docstring says, in one line that fits into a table."""
    return " ".join(described.get("description", "").split()).replace("|", "\\|")


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _allowed(field: Schema) -> str:
    if "anyOf" in field:
        return "; ".join(_allowed(one) for one in field["anyOf"])
    if "const" in field or "enum" in field:
        return ", ".join(f"`{_value(one)}`" for one in field.get("enum", [field.get("const")]))
    if field["type"] == "array":
        least, most = field.get("minItems", 0), field.get("maxItems")
        count = f" of {most}" if least == most else f" of {least} or more" if least else ""
        return f"list{count}: {_allowed(field['items'])}"
    return _TYPES[field["type"]] + _range(field)


def _range(field: Schema) -> str:
    limits = ", ".join(f"{sign} {field[rule]}" for rule, sign in _LIMITS.items() if rule in field)
    return f" {limits}" if limits else ""


def _references(field: Schema) -> list[str]:
    """Classes of sections that a field may hold; none where it is a plain value."""
    if "$ref" in field:
        return [field["$ref"].removeprefix("#/$defs/")]
    return [name for one in [*field.get("anyOf", []), *field.get("oneOf", [])] for name in _references(one)]


def _anchor(heading: str) -> str:
    """Of a heading, as GitHub makes it."""
    return heading.lower().replace(".", "")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(to_text(), encoding="utf-8")
