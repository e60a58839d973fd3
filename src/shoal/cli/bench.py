"""`shoal bench`: measures, prints a table, writes JSON and a plot."""

from pathlib import Path
from typing import Any

import click

from shoal.cli.completing import complete_train
from shoal.core.storage import to_json_line
from shoal.recipe.load import LoadedRecipe, load_recipe
from shoal.recipe.merge import is_override

_WORDS = click.argument("words", nargs=-1, metavar="[RECIPE]... [KEY=VALUE]...", shell_complete=complete_train)
_OUT = click.option("--out", default="bench", metavar="DIR", help="Where JSON and plot go (default: bench).")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")


@click.group("bench")
def command() -> None:
    """Measure Shoal against hand-written code, side by side in one run."""


@command.command("step")
@_WORDS
@click.option("--steps", default=200, type=click.IntRange(1), help="Steps a round (default: 200).")
@click.option("--rounds", default=7, type=click.IntRange(1), help="Rounds, each loop once in each (default: 7).")
@_OUT
@_JSON
def step_command(words: tuple[str, ...], steps: int, rounds: int, out: str, as_json: bool) -> int:
    """The loop's cost per step against a loop written by hand. Without RECIPE: on a trivial model."""
    from shoal.bench.results import keep
    from shoal.bench.step import TRIVIAL, measure

    recipe = _load(words, TRIVIAL).recipe
    result = measure(recipe, steps, rounds, warmup=min(steps, 20))
    bars = {"shoal": result["shoal_step_ms"], "by hand": result["by_hand_step_ms"]}
    rows = [
        ("shoal", f"{result['shoal_step_ms']:.4f} ms a step"),
        ("by hand", f"{result['by_hand_step_ms']:.4f} ms a step"),
        ("ratio", f"{result['ratio']:.4f}"),
        ("overhead", f"{result['overhead_us']:.1f} us a step"),
    ]
    return _tell(result, rows, keep(Path(out), f"step-{recipe.name}", result, bars, "ms a step"), as_json)


@command.command("data")
@_WORDS
@click.option("--rounds", default=5, type=click.IntRange(1), help="Epochs of each loader, in turns (default: 5).")
@_OUT
@_JSON
def data_command(words: tuple[str, ...], rounds: int, out: str, as_json: bool) -> int:
    """Samples a second of Shoal's loader against torch's DataLoader. Without RECIPE: synthetic_mlp."""
    from shoal.bench.data import measure
    from shoal.bench.results import keep

    recipe = _load(words, "synthetic_mlp").recipe
    result = measure(recipe, rounds)
    bars = {"shoal": result["shoal_samples_per_s"], "DataLoader": result["dataloader_samples_per_s"]}
    rows = [
        ("shoal", f"{result['shoal_samples_per_s']:,.0f} samples/s"),
        ("DataLoader", f"{result['dataloader_samples_per_s']:,.0f} samples/s"),
        ("ratio", f"{result['ratio']:.2f}"),
    ]
    return _tell(result, rows, keep(Path(out), f"data-{recipe.name}", result, bars, "samples/s"), as_json)


def _load(words: tuple[str, ...], default: Any) -> LoadedRecipe:
    recipes = [word for word in words if not is_override(word)]
    return load_recipe(recipes or [default], [word for word in words if is_override(word)])


def _tell(result: dict[str, Any], rows: list[tuple[str, str]], written: list[Path], as_json: bool) -> int:
    for name, value in rows:
        click.echo(f"{name:12}{value}", err=as_json)
    click.echo("written to " + ", ".join(map(str, written)), err=True)
    if as_json:
        click.echo(to_json_line(result))
    return 0
