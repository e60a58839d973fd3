"""What the shell offers after TAB: recipes, fields to override, runs."""

import click
from click.shell_completion import CompletionItem
from pydantic import BaseModel

from shoal.observe.runs import run_names
from shoal.recipe.load import shipped_recipes
from shoal.recipe.merge import is_override
from shoal.recipe.schema import Recipe


def complete_train(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shipped recipes, files, and `section.field=`."""
    if is_override(incomplete):
        return []
    names = [CompletionItem(name, help=words) for name, words in shipped_recipes().items()]
    fields = [CompletionItem(f"{field}=") for field in override_fields()]
    offered = [item for item in names + fields if item.value.startswith(incomplete)]
    # Files first: click's script for bash forgets what came before them.
    return offered if offered and incomplete else [CompletionItem(incomplete, type="file"), *offered]


def complete_run(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of runs."""
    return [CompletionItem(name) for name in sorted(run_names()) if name.startswith(incomplete)]


def override_fields() -> list[str]:
    """Dotted names of the fields that every recipe has, and the names of its task, model and data."""
    fields = ["task", "model", "data"]
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields += [f"{name}.{inner}" for inner in field.annotation.model_fields]
    return fields
