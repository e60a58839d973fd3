"""`shoal.train(recipe)`: the same as the command, from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.launch.interrupts import Interrupts
from shoal.launch.run import Launch, launch, prepare
from shoal.observe.console import make_console

RecipeSource = str | Path | Mapping[str, Any]


def train(
    recipe: RecipeSource | Sequence[RecipeSource] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    progress: str = "auto",
) -> dict[str, Any]:
    """Train a recipe (a shipped name, a file, a mapping, or several that are laid over one another).

    Returns the summary that `shoal train --json` prints. `progress`: auto, lines, json or silent. Raises
    `shoal.UserError` when the input is wrong and `shoal.RunError` when the run fails. On Ctrl-C a checkpoint is saved
    and the summary's status is `interrupted`.
    """
    sources: list[Any] = [] if recipe is None else list(recipe) if isinstance(recipe, list | tuple) else [recipe]
    prepared = prepare(sources, overrides, run_dir=run_dir, resume=resume)
    console = make_console(progress)
    try:
        with Interrupts() as stop:
            return launch(prepared, Launch(console, stop))
    finally:
        console.close()
