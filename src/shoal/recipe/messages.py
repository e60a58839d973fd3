"""Turning validation errors into one line each: the field, what was given, what is allowed, the nearest name."""

import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shoal.core.section import CUSTOM, Section, nearest, one_of
from shoal.recipe.schema import Recipe
from shoal.recipe.yaml_tree import Path, dotted


def describe(error: ValidationError, references: Mapping[Path, str], origins: Mapping[Path, str]) -> str:
    """All that is wrong with a recipe, one line a field."""
    details = error.errors(include_url=False)
    by_field: dict[Path, list[ErrorDetails]] = {}
    for detail in details:
        by_field.setdefault(user_path(detail["loc"]), []).append(detail)
    lines = []
    for path, found in by_field.items():
        if len(found) > 1 and any(len(detail["loc"]) > len(path) for detail in found):
            lines.append(_line_of_union(path, found, references, origins))
        else:
            lines.extend(_line(detail, references, origins) for detail in found)
    return "\n".join(dict.fromkeys(lines))


def _line_of_union(
    path: Path, details: list[ErrorDetails], references: Mapping[Path, str], origins: Mapping[Path, str]
) -> str:
    """A field that may be of several types, each of which pydantic has an error for: a number, or a word."""
    allowed = [
        detail["ctx"]["expected"].replace("'", "") if detail["type"] == "literal_error" else _words(detail)
        for detail in details
    ]
    given = _given(details[0]["input"], path, references)
    return f"{dotted(path)}: {' or '.join(allowed)}{f' (given: {given})' if given else ''}{_origin(path, origins)}"


def _line(detail: ErrorDetails, references: Mapping[Path, str], origins: Mapping[Path, str]) -> str:
    path, section = _locate(detail["loc"])
    given = _given(detail["input"], path, references)
    context = detail.get("ctx", {})
    kind = detail["type"]
    if kind == "extra_forbidden":
        keys = list(section.model_fields) if section else []
        guess = nearest(path[-1], keys)
        prefix = dotted(path[:-1])
        hint = f"; did you mean {prefix + '.' if prefix else ''}{guess}?" if guess else ""
        message = f"unknown key{hint} (keys here: {', '.join(keys)})"
    elif kind == "missing":
        message = "is required" + (f" ({_field_words(section, path[-1])})" if section else "")
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        names = context.get("expected_tags", "").replace("'", "").split(", ")
        value = context.get("tag")
        if value is None:
            message = "needs a name" + (f" (given: {given})" if given else "")
        else:
            path = (*path, "name")
            message = f"{_given(value, path, references)} is unknown; {one_of(str(value), [n for n in names if n])}"
            message = message.replace(CUSTOM, f"your own {CUSTOM}")
    elif kind == "literal_error":
        names = [part.strip("'") for part in context["expected"].replace(" or ", ", ").split(", ")]
        message = f"{given} is not allowed; {one_of(str(detail['input']), names)}"
    else:
        message = _words(detail) + (f" (given: {given})" if given else "")
    origin = _origin(path, origins)
    return f"{dotted(path) or 'recipe'}: {message}{origin}"


def user_path(location: tuple[int | str, ...]) -> Path:
    """Where in a recipe, as a user writes it, pydantic's location is."""
    return _locate(location)[0]


def _locate(location: tuple[int | str, ...]) -> tuple[Path, type[Section] | None]:
    """The path as a user writes it (without pydantic's union tags), and the section that holds its last part."""
    path: list[str] = []
    here: Any = Recipe
    section: type[Section] | None = Recipe
    for part in location:
        choices = _union_sections(here)
        if isinstance(part, str) and part in choices:
            here = choices[part]
            continue
        if part == "[key]":  # pydantic's word for the key itself, which stands before it
            continue
        if isinstance(part, str) and not choices and typing.get_origin(here) in (typing.Union, types.UnionType):
            continue  # its name of one of several plain types
        here = _without_none(here)
        if isinstance(here, type) and issubclass(here, Section):
            section = here
            here = here.model_fields[part].annotation if part in here.model_fields else None
        else:
            section, here = None, None
        path.append(str(part))
    return tuple(path), section


def _without_none(annotation: Any) -> Any:
    """A section that may be left out is that section."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    return members[0] if len(members) == 1 else annotation


def _union_sections(annotation: Any) -> dict[str, type[Section]]:
    """tag -> section class, for a field that is one of several sections."""
    found: dict[str, type[Section]] = {}
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            found |= _union_sections(member)
    elif typing.get_origin(annotation) is typing.Annotated:
        base, *metadata = typing.get_args(annotation)
        tags = [item.tag for item in metadata if hasattr(item, "tag")]
        found |= dict.fromkeys(tags, base) or _union_sections(base)
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        found[annotation.__name__] = annotation  # pydantic's own tag in a plain union with None
    return found


def _field_words(section: type[Section], name: str) -> str:
    field = section.model_fields.get(name)
    return (field.description if field else None) or f"a section of {section.__name__.lower()}"


def _given(value: Any, path: Path, references: Mapping[Path, str]) -> str:
    for length in range(1, len(path) + 1):
        if path[:length] in references:
            return references[path[:length]]
    if isinstance(value, dict | list) and any(reference[: len(path)] == path for reference in references):
        return ""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _words(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    words = {
        "int_type": "should be a whole number",
        "int_from_float": "should be a whole number",
        "float_type": "should be a number",
        "finite_number": "should be a finite number",
        "bool_type": "should be true or false",
        "string_type": "should be text",
        "list_type": "should be a list",
        "dict_type": "should be a mapping",
        "model_type": "should be a section with fields",
        "model_attributes_type": "should be a section with fields",
        "greater_than": f"should be greater than {context.get('gt')}",
        "greater_than_equal": f"should be at least {context.get('ge')}",
        "less_than": f"should be less than {context.get('lt')}",
        "less_than_equal": f"should be at most {context.get('le')}",
        "too_short": f"should have at least {context.get('min_length')} items",
        "too_long": f"should have at most {context.get('max_length')} items",
        "string_pattern_mismatch": f"should look like {context.get('pattern')}",
    }
    return words.get(detail["type"]) or detail["msg"].removeprefix("Input ")


def _origin(path: Path, origins: Mapping[Path, str]) -> str:
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return f" [{origins[path[:length]]}]"
    return ""
