"""The JSON Schema of a recipe, from which editors complete and check. `python -m shoal.recipe.json_schema FILE`."""

import json
import sys
from pathlib import Path
from typing import Any

from shoal.recipe.schema import NAMED_SECTIONS, Recipe


def recipe_json_schema() -> dict[str, Any]:
    """The schema; task, model and data may also be given by their name alone."""
    schema = Recipe.model_json_schema()
    for name in NAMED_SECTIONS:
        field = schema["properties"][name]
        by_name = {"type": "string", "description": "The name alone."}
        if "anyOf" in field:
            field["anyOf"].append(by_name)
        else:
            schema["properties"][name] = {"anyOf": [field, by_name]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def to_text() -> str:
    """As it is kept in docs/recipe.schema.json."""
    return json.dumps(recipe_json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(to_text(), encoding="utf-8")
