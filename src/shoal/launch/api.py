"""`shoal.train(recipe)`: the same as the command, from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import UserError
from shoal.core.section import one_of
from shoal.launch.interrupts import Interrupts
from shoal.launch.run import Launch, is_silent, launch, prepare, under_torchrun
from shoal.observe.console import make_console

LAUNCHERS = ("auto", "local", "torchrun", "ray")
RecipeSource = str | Path | Mapping[str, Any]


def train(
    recipe: RecipeSource | Sequence[RecipeSource] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    progress: str = "auto",
    launcher: str = "auto",
    address: str | None = None,
    wait_s: float = 0,
) -> dict[str, Any]:
    """Train a recipe (a shipped name, a file, a mapping, or several that are laid over one another).

    Returns the summary that `shoal train --json` prints. `progress`: auto, lines, json or silent. `launcher`: auto,
    local, torchrun or ray; `address` is a Ray cluster's, and `wait_s` how long to wait for what it does not have yet.
    How many workers is a field of the recipe: `cluster.workers`. Raises `shoal.UserError` when the input is wrong and
    `shoal.RunError` when the run fails. On Ctrl-C a checkpoint is saved and the summary's status is `interrupted`.
    """
    if launcher not in LAUNCHERS:
        raise UserError(f"launcher: {launcher!r} is not allowed; {one_of(launcher, LAUNCHERS)}")
    sources: list[Any] = [] if recipe is None else list(recipe) if isinstance(recipe, list | tuple) else [recipe]
    prepared = prepare(sources, overrides, run_dir=run_dir, resume=resume)
    console = make_console("silent" if is_silent() else progress)
    try:
        with Interrupts(is_silent=under_torchrun()) as stop:
            how = Launch(console, stop, stop.enter, launcher=launcher, address=address, wait_s=wait_s)
            return launch(prepared, how)
    finally:
        console.close()
