"""What the chart's schema says of a value, in a sentence: Helm tells patterns and limits, and no examples."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.section import one_of
from shoal.deploy.files import shipped

_FILE = "helm/shoal/values.schema.json"
_GIVEN = re.compile(
    r"^(?:'(?P<text>.*?)' does not match pattern|(?:exclusiveM|m)(?:in|ax)imum: got (?P<number>\S+), want)", re.DOTALL
)
_UNKNOWN = re.compile(r"^additional propert\w+ (.*) not allowed")
_MISSING = re.compile(r"^missing propert\w+ (.*)")
_QUOTED = re.compile(r"'(.*?)'(?=, '|$)")
_OLD_WORDS = (
    (re.compile(r"^Additional property (.*) is not allowed$"), r"additional properties '\1' not allowed"),
    (re.compile(r"^(\S+) is required$"), r"missing property '\1'"),
)
"""Helm before 3.18, and what it says since."""


def in_a_sentence_of_old(where: str, said: str) -> str:
    """A complaint in the form of Helm before 3.18 (`workers.cpu.gpus: Must be ...`, where the whole is `(root)`)."""
    for pattern, words in _OLD_WORDS:
        said = pattern.sub(words, said)
    return in_a_sentence("" if where == "(root)" else "/" + where.replace(".", "/"), said)


def in_a_sentence(where: str, said: str) -> str:
    """A complaint of Helm's (`minimum: got -1, want 0`) about the value at a path (`/workers/cpu/gpus`): what was
    given, and what it should be."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in where.split("/")[1:]]
    schema, name = schema_of(parts), ".".join(parts)
    if unknown := _UNKNOWN.match(said):
        return "\n".join(_unknown(schema, name, key) for key in _QUOTED.findall(unknown[1]))
    if missing := _MISSING.match(said):
        return "\n".join(f"{f'{name}.' if name else ''}{key}: is missing" for key in _QUOTED.findall(missing[1]))
    if said == "false schema":
        return f"{name}: is not the user's to say here; leave it out"
    wanted = schema.get("description") if schema is not None else None
    if wanted is None or (schema is not None and "enum" in schema):
        return f"{name or 'values'}: {said}"
    found = _GIVEN.match(said)
    if found is None:
        return f"{name}: should be {wanted} ({said})"
    if said.startswith("maximum") and schema is not None and str(schema["maximum"]) not in wanted:
        wanted = f"{wanted}, {schema['maximum']} at most"
    given = repr(found["text"]) if found["text"] is not None else found["number"].replace(",", "")
    return f"{name}: {given} should be {wanted}"


def schema_of(parts: Sequence[str]) -> Mapping[str, Any] | None:
    """What the schema has for the value there, or None."""
    node: Any = _whole()
    for part in parts:
        node = _resolved(_below(node, part))
        if node is None:
            return None
    found: Mapping[str, Any] = node
    return found


def _below(node: Mapping[str, Any], part: str) -> Any:
    if part.isdigit() and "items" in node:
        return node["items"]
    if part in node.get("properties", {}):
        return node["properties"][part]
    by_pattern = (one for pattern, one in node.get("patternProperties", {}).items() if re.search(pattern, part))
    return next(by_pattern, node.get("additionalProperties"))


def _unknown(schema: Mapping[str, Any] | None, name: str, key: str) -> str:
    where = f"{name}.{key}" if name else key
    schema = schema or {}
    if "patternProperties" in schema:
        return f"{where}: {key!r} is no such name; these are {schema['description']}"
    return f"{where}: there is no such value; {one_of(key, schema.get('properties', {}))}"


def _resolved(node: Any) -> Mapping[str, Any] | None:
    if not isinstance(node, dict):
        return None
    if "$ref" in node:
        referred: Mapping[str, Any] = _whole()["definitions"][node["$ref"].rpartition("/")[2]]
        return referred
    return node


@functools.cache
def _whole() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(shipped(_FILE).read_text(encoding="utf-8"))
    return found
