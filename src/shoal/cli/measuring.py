"""What the commands of `shoal bench` have in common."""

from pathlib import Path
from typing import Any

import click

from shoal.cli.words import recipes_and_overrides
from shoal.core.storage import to_json_line
from shoal.recipe.load import LoadedRecipe, load_recipe

OUT = click.option("-o", "--out", default="bench", metavar="DIR", help="Where JSON and plot go (default: bench).")
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")


def load(words: tuple[str, ...], default: Any) -> LoadedRecipe:
    """The recipe of the command line, or `default` where it names none."""
    recipes, overrides = recipes_and_overrides(words)
    return load_recipe(recipes or [default], overrides)


def say(line: str) -> None:
    """How far it is."""
    click.echo(line, err=True)


def tell(result: dict[str, Any], rows: list[tuple[str, str]], written: list[Path], as_json: bool) -> int:
    """What was found and where it is kept; the exit status."""
    for name, value in rows:
        click.echo(f"{name:13}{value}", err=as_json)
    click.echo("written to " + ", ".join(map(str, written)), err=True)
    if as_json:
        click.echo(to_json_line(result))
    return 0
