"""`shoal.tune(recipe, space)`: the same as the command, from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.launch.interrupts import Interrupts
from shoal.tune.folder import SearchFolder, prepare_search
from shoal.tune.tuning import TuneLaunch, run_search
from shoal.tune.view import make_view

RecipeSource = str | Path | Mapping[str, Any]


def tune(
    recipe: RecipeSource | Sequence[RecipeSource] | None = None,
    space: RecipeSource | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    search_dir: str | Path | None = None,
    resume: str | Path | None = None,
    progress: str = "auto",
    address: str | None = None,
    retry_failed: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Search for the best settings of a recipe over a space (a file, or a mapping such as
    `{"optim.lr": "loguniform(1e-5, 1e-2)"}`).

    `settings` are those of `shoal.tune.section.TuneSection`: trials, search, scheduler, metric, concurrency, seed, and
    others. Returns the summary that `shoal tune --json` prints. `progress`: auto, lines, json or silent. Raises
    `shoal.UserError` when the input is wrong and `shoal.RunError` when the search fails. On Ctrl-C the trials save, and
    the summary's status is `interrupted`.
    """
    sources: list[Any] = [] if recipe is None else list(recipe) if isinstance(recipe, list | tuple) else [recipe]
    setup, folder = prepare_search(sources, overrides, space, settings, search_dir=search_dir, resume=resume)
    interrupts = Interrupts(as_json=progress == "json", is_silent=progress == "silent")
    view = make_view(progress, setup, on_drawn=interrupts.tell_elsewhere)
    try:
        with interrupts as stop:
            return run_search(
                setup, SearchFolder(folder), TuneLaunch(view, stop, stop.enter, address, retry_failed=retry_failed)
            )
    finally:
        view.close()
