"""The schema that editors use says the same as the code that loads a recipe."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.core.errors import UserError
from shoal.recipe.json_schema import recipe_json_schema, to_text
from shoal.recipe.load import load_recipe, shipped_recipes
from tests.tiny import TINY

SCHEMA = recipe_json_schema()
REPOSITORY = Path(__file__).parents[2]
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
WORDS = {"title", "description", "default", "$defs", "$schema", "type", "additionalProperties"}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is valid by a schema: as much of JSON Schema as a recipe's makes use of."""
    kind = schema.get("type")
    if kind is not None:
        is_bool = isinstance(value, bool) and kind != "boolean"
        if is_bool or not isinstance(value, TYPES[kind]):
            return False
    return all(_fits_rule(value, rule, argument, schema) for rule, argument in schema.items() if rule not in WORDS)


def _fits_rule(value: Any, rule: str, argument: Any, schema: dict[str, Any]) -> bool:
    number, sized = isinstance(value, int | float), isinstance(value, list)
    match rule:
        case "$ref":
            return fits(value, SCHEMA["$defs"][argument.removeprefix("#/$defs/")])
        case "anyOf":
            return any(fits(value, one) for one in argument)
        case "oneOf":
            return sum(fits(value, one) for one in argument) == 1
        case "const":
            return bool(value == argument)
        case "enum":
            return value in argument
        case "required":
            return all(name in value for name in argument)
        case "properties" | "patternProperties":
            return _fits_properties(value, schema)
        case "items":
            return not sized or all(fits(item, argument) for item in value)
        case "minItems":
            return not sized or len(value) >= argument
        case "maxItems":
            return not sized or len(value) <= argument
        case "pattern":
            return not isinstance(value, str) or re.search(argument, value) is not None
        case "minLength":
            return not isinstance(value, str) or len(value) >= argument
        case "minimum":
            return not number or value >= argument
        case "maximum":
            return not number or value <= argument
        case "exclusiveMinimum":
            return not number or value > argument
        case "exclusiveMaximum":
            return not number or value < argument
    raise AssertionError(f"{rule} is new in the schema: teach it to this test")


def _fits_properties(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    for name, item in value.items():
        rules = [schema["properties"][name]] if name in schema.get("properties", {}) else []
        rules += [rule for pattern, rule in schema.get("patternProperties", {}).items() if re.search(pattern, name)]
        if not (rules or schema.get("additionalProperties", True)) or not all(fits(item, rule) for rule in rules):
            return False
    return True


def test_the_schema_in_the_docs_is_that_of_the_code() -> None:
    text = (REPOSITORY / "docs" / "recipe.schema.json").read_text()
    assert text == to_text(), "run make schema"
    assert json.loads(text) == SCHEMA


def test_every_field_is_described() -> None:
    for name, definition in SCHEMA["$defs"].items():
        for field, schema in definition["properties"].items():
            assert field == "name" or "description" in schema, f"{name}.{field}"


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_fits_as_it_is_and_resolved(name: str) -> None:
    written = REPOSITORY / "src" / "shoal" / "recipe" / "shipped" / f"{name}.yaml"
    assert fits(yaml.safe_load(written.read_text()), SCHEMA)
    assert fits(load_recipe([name]).tree(), SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("task", "my_task:Regression"),
        ("task", {"name": "my_task:Regression", "args": {"size": 3}}),
        ("model", {"name": "torchvision:resnet18", "args": {}}),
        ("model", "mlp"),
        ("early_stop", {"metric": "val_loss"}),
        ("early_stop", None),
        ("optim.betas", [0.9, 0.99]),
        ("cluster", {"gpu_allocator": "expandable_segments:True"}),
        ("cluster", {"workers": 4, "min_workers": 2}),
        ("cluster", {"gpus_per_worker": 0.5}),
        ("cluster", {"gpus_per_worker": 1}),
        ("parallel", {"strategy": "ddp", "compress": "powersgd", "bucket_mb": 12.5}),
        ("nccl", {"interface": "^docker0,lo", "timeout_s": 30, "environment": {"NCCL_ALGO": "Ring"}}),
        ("failures", {"max_restarts": 0}),
    ],
)
def test_what_loads_fits(path: str, value: Any) -> None:
    tree = changed(path, value)
    load_recipe([tree])
    assert fits(tree, SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimm", {}),
        ("optim.lrr", 1),
        ("optim.lr", "fast"),
        ("optim.lr", 0),
        ("optim.name", "lion"),
        ("optim.betas", [0.9]),
        ("train.steps", 1.5),
        ("train.steps", True),
        ("train.precision", "fp8"),
        ("model", {"name": "mlp", "layers": 3}),
        ("model", {"hidden": [4]}),
        ("model", {"name": "resnet19"}),
        ("model.hidden", [4, "x"]),
        ("data.shape", [1, 4]),
        ("name", "../x"),
        ("observe", None),
        ("cluster", {"workers": 0}),
        ("cluster", {"gpus_per_worker": 1.5}),
        ("cluster", {"gpus_per_worker": -1}),
        ("cluster", {"gpus_per_worker": True}),
        ("parallel", {"compress": "zip"}),
        ("parallel", {"powersgd_start_step": 1}),
        ("nccl", {"interface": "eth0; rm"}),
        ("nccl", {"environment": {"PATH": "x"}}),
        ("nccl", {"environment": {"NCCL_ALGO": 3}}),
        ("failures", {"hang_timeout_s": 0}),
        ("train", {"steps": 3, "epoch": 3}),
    ],
)
def test_what_does_not_load_does_not_fit(path: str, value: Any) -> None:
    tree = changed(path, value)
    with pytest.raises(UserError):
        load_recipe([tree])
    assert not fits(tree, SCHEMA)


def changed(path: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(TINY)
    *above, last = path.split(".")
    here = tree
    for part in above:
        here = here[part]
    here[last] = value
    return tree


def test_the_module_writes_the_file(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "shoal.recipe.json_schema", tmp_path / "s.json"], check=True, timeout=60)
    assert (tmp_path / "s.json").read_text() == to_text()
