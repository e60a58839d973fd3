"""What the commands that take a recipe have in common: its words on the command line, and its workers."""

import json

import click

from shoal.cli.completing import complete_run, complete_train
from shoal.core.errors import UserError
from shoal.core.storage import expand_home
from shoal.observe.runs import find_run
from shoal.recipe.merge import is_override

WORDS = click.argument("words", nargs=-1, metavar="[RECIPE]... [KEY=VALUE]...", shell_complete=complete_train)
WORKERS = click.option(
    "--workers", metavar="N|MIN:MAX", help="Processes that train together; MIN:MAX: as many as there are."
)
GPU = click.option(
    "--gpu", is_flag=True, help="A GPU for each worker, or an error; the same as cluster.gpus_per_worker=1."
)
ADDRESS = click.option("--address", metavar="ADDR", help="A Ray cluster: auto, HOST:PORT or ray://HOST:PORT.")
RESUME = click.option(
    "--resume", metavar="RUN", shell_complete=complete_run, help="Go on with a run from its newest checkpoint."
)

INIT_FROM = click.option(
    "--init-from", metavar="PATH", help="Begin a new run with these weights: an export, a checkpoint or a run."
)


def recipes_and_overrides(
    words: tuple[str, ...], workers: str | None = None, gpu: bool = False
) -> tuple[list[str], list[str]]:
    """The recipes among the words, and all that is laid over them."""
    overrides = [word for word in words if is_override(word)] + _worker_overrides(workers)
    if gpu:
        overrides.append("cluster.gpus_per_worker=1")
    return [word for word in words if not is_override(word)], overrides


def _worker_overrides(workers: str | None) -> list[str]:
    """`--workers N` or `MIN:MAX` as overrides of the recipe."""
    if workers is None:
        return []
    parts = workers.split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--workers: {workers!r} should be a whole number above 0, or two of them: MIN:MAX")
    if int(parts[0]) > int(parts[-1]):
        raise UserError(f"--workers: {workers!r} begins with the larger number; write MIN:MAX, as in 1:3")
    if len(parts) == 1:
        return [f"cluster.workers={parts[0]}", "cluster.min_workers=null"]
    return [f"cluster.workers={parts[1]}", f"cluster.min_workers={parts[0]}"]


def init_from_override(path: str, is_here: bool) -> str:
    """`--init-from PATH` as an override of the recipe: absolute, for workers in other folders.

    Args:
        path: A path, or the name of a run.
        is_here: Whether the workers are on this machine; others may see what is not here.
    """
    found = expand_home(path)
    if not found.exists():
        try:
            found = find_run(path)
        except UserError as error:
            if is_here:
                raise UserError(f"--init-from: {path} is neither a file nor a folder, nor a run ({error})") from error
    # JSON is YAML, whatever the path is made of.
    return f"train.init_from={json.dumps(str(found.absolute()), ensure_ascii=False)}"
