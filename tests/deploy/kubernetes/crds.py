"""The schemas of the custom resources that the chart makes, and what fits them: `crds.json.gz` beside this file.

They are those of KubeRay 1.7.0, the Prometheus operator 0.93.0 and Kueue 0.19.2 (Apache 2.0), without descriptions.
Made anew by `python -m tests.deploy.kubernetes.crds FOLDER`, where FOLDER has their CustomResourceDefinitions as YAML.
"""

import functools
import gzip
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

_FILE = Path(__file__).with_name("crds.json.gz")


def schemas_in(folder: Path) -> dict[str, Any]:
    """`GROUP/VERSION KIND` -> the schema of each that is served."""
    found = {}
    for file in sorted(folder.glob("*.yaml")):
        for definition in yaml.load_all(file.read_text(), yaml.CSafeLoader):
            if definition and definition["kind"] == "CustomResourceDefinition":
                spec = definition["spec"]
                for version in spec["versions"]:
                    if version["served"]:
                        name = f"{spec['group']}/{version['name']} {spec['names']['kind']}"
                        found[name] = _bare(version["schema"]["openAPIV3Schema"], is_schema=True)
    return found


def write(folder: Path) -> None:
    text = json.dumps(schemas_in(folder), sort_keys=True, separators=(",", ":"))
    _FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


@functools.cache
def schemas() -> Mapping[str, Any]:
    """Those that are kept here."""
    found: dict[str, Any] = json.loads(gzip.decompress(_FILE.read_bytes()))
    return found


@functools.cache
def _validator(name: str) -> jsonschema.Draft7Validator:
    return _Validator(_strict(schemas()[name], is_top=True))


def _keys_are_unique(_: Any, keys: list[str], items: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """Of a list that is a map: variables by name, mounts by path."""
    seen = set()
    for item in items if isinstance(items, list) else ():
        key = tuple(str(item.get(name)) for name in keys)
        if key in seen:
            yield jsonschema.ValidationError(f"{dict(zip(keys, key, strict=True))} is there twice")
        seen.add(key)


_Validator = jsonschema.validators.extend(jsonschema.Draft7Validator, {"list-map-keys": _keys_are_unique})


def complaints(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What the API server would refuse of a custom resource; KeyError if it is none that is known here."""
    for error in _validator(f"{manifest['apiVersion']} {manifest['kind']}").iter_errors(manifest):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"


def _bare(node: Any, *, is_schema: bool) -> Any:
    """Without descriptions; a property may be called so."""
    if isinstance(node, list):
        return [_bare(item, is_schema=is_schema) for item in node]
    if not isinstance(node, dict):
        return node
    if not is_schema:
        return {name: _bare(value, is_schema=True) for name, value in node.items()}
    return {
        name: value if name in ("default", "enum") else _bare(value, is_schema=name != "properties")
        for name, value in node.items()
        if name != "description"
    }


def _strict(schema: Any, *, is_top: bool = False) -> Any:
    """As JSON Schema: fields that are not named are refused, what has a default may be left out."""
    if not isinstance(schema, dict):
        return schema
    result = {name: value for name, value in schema.items() if not name.startswith("x-kubernetes-")}
    if schema.get("x-kubernetes-list-type") == "map":
        result["list-map-keys"] = schema["x-kubernetes-list-map-keys"]
    properties = {name: _strict(value) for name, value in schema.get("properties", {}).items()}
    if is_top:
        properties = {"apiVersion": {}, "kind": {}} | properties | {"metadata": {"type": "object"}}
    if properties:
        result["properties"] = properties
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if name in schema:
            result[name] = _strict(schema[name])
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    if "required" in schema:
        result["required"] = [name for name in schema["required"] if "default" not in properties.get(name, {})]
    return result


if __name__ == "__main__":
    write(Path(sys.argv[1]))
