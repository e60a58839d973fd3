"""`shoal tune`: a recipe and a space in, the best recipe out."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from shoal.cli.completing import complete_train
from shoal.cli.words import ADDRESS, GPU, WORKERS, recipes_and_overrides
from shoal.core.errors import RunError, UserError
from shoal.core.secrets import scrub
from shoal.core.storage import expand_home
from shoal.recipe.load import shipped_recipes
from shoal.recipe.merge import is_override
from shoal.recipe.yaml_tree import parse_value
from shoal.tune.section import SCHEDULERS, SEARCHES

_PREFIX = "tune."


@click.command("tune")
@click.argument("words", nargs=-1, metavar="RECIPE... SPACE [KEY=VALUE]...", shell_complete=complete_train)
@click.option(
    "--trials", type=int, metavar="N", help="Runs to make (default: a grid's points, a population of 8, or 16)."
)
@click.option("--search", type=click.Choice(SEARCHES), help="Who proposes settings (default: random, or grid).")
@click.option("--scheduler", type=click.Choice(SCHEDULERS), help="Who stops or replaces trials (default: none).")
@click.option("--metric", multiple=True, metavar="NAME[:min|max]", help="What to go by; several: a Pareto front.")
@click.option("--concurrency", type=int, metavar="N", help="Trials at a time (default: as many as there is room for).")
@click.option("--seed", type=int, metavar="N", help="Fixes what is proposed (default: 0).")
@WORKERS
@GPU
@ADDRESS
@click.option("--dashboard", is_flag=True, help="Start Ray's dashboard with a Ray of our own.")
@click.option("--search-dir", metavar="DIR", help="The search's folder; otherwise searches/NAME-DATE-ID.")
@click.option("--resume", metavar="SEARCH", help="Go on with a search from its journal.")
@click.option("--retry-failed", is_flag=True, help="With --resume: start trials again that have failed.")
@click.option("--json", "as_json", is_flag=True, help="End with the summary as one JSON object on stdout.")
@click.option("--log-json", is_flag=True, help="Log as JSON lines instead of a table.")
@click.option("-v", "--verbose", is_flag=True, help="Show what Ray itself has to say.")
@click.option("--dry-run", is_flag=True, help="Print what would be searched and the first proposals, and stop.")
def command(
    words: tuple[str, ...],
    trials: int | None,
    search: str | None,
    scheduler: str | None,
    metric: tuple[str, ...],
    concurrency: int | None,
    seed: int | None,
    workers: str | None,
    gpu: bool,
    address: str | None,
    dashboard: bool,
    search_dir: str | None,
    resume: str | None,
    retry_failed: bool,
    as_json: bool,
    log_json: bool,
    verbose: bool,
    dry_run: bool,
) -> int:
    """Search for the best settings of a RECIPE over a SPACE: a file with lines like `optim.lr: loguniform(1e-5, 1e-2)`.
    Every trial is a run of its own, on as many workers as the recipe says. KEY=VALUE overrides any field of the recipe,
    and tune.KEY=VALUE how to search.

    \b
    shoal tune digits space.yaml --trials 20 --scheduler asha
    shoal tune mnist space.yaml --search optuna --metric val_accuracy --workers 2 --address auto
    shoal tune --resume searches/digits-20260101-120000-ab12
    """
    from shoal.tune.folder import prepare_search

    if retry_failed and resume is None:
        raise UserError("--retry-failed: goes with --resume SEARCH, whose failed trials are started again")
    said = {
        "trials": trials,
        "search": search,
        "scheduler": scheduler,
        "metric": list(metric) or None,
        "concurrency": concurrency,
        "seed": seed,
    }
    own = [word for word in words if is_override(word) and word.startswith(_PREFIX)]
    settings = {name: value for name, value in said.items() if value is not None} | _settings(own)
    rest = tuple(word for word in words if word not in own)
    names, overrides = recipes_and_overrides(rest, workers, gpu)
    space, recipes = _space_and_recipes(names) if resume is None else (None, names)
    setup, folder = prepare_search(recipes, overrides, space, settings, search_dir=search_dir, resume=resume)
    if dry_run:
        return _dry_run(setup)
    options = {"address": address, "verbose": verbose, "dashboard": dashboard, "retry_failed": retry_failed}
    summary = _search(setup, folder, "json" if log_json else "auto", as_json, options)
    _print(summary, as_json)
    if summary["status"] == "interrupted":
        at = f" --address {scrub(address)}" if address else ""
        click.echo(f"interrupted; go on with:\n  shoal tune --resume {shlex.quote(str(folder))}{at}", err=True)
        return 130
    return 0


def _settings(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        key, _, text = word.removeprefix(_PREFIX).partition("=")
        found[key] = parse_value(text, f"{_PREFIX}{key}")
    return found


def _space_and_recipes(names: list[str]) -> tuple[str | None, list[str]]:
    """Which of the words is the space: the last one."""
    if not names or (len(names) == 1 and names[0] in shipped_recipes()):
        return None, names
    *recipes, space = names
    if recipes and (early := next((name for name in recipes if _is_space(name)), None)) is not None:
        raise UserError(
            f"SPACE: {early!r} is one, and comes last; {space!r} after it is neither a recipe nor KEY=VALUE"
        )
    if recipes == [space]:
        raise UserError(
            f"SPACE: is missing: {space!r} is a recipe; give a file with lines like optim.lr: uniform(0, 1)"
        )
    if recipes and space in shipped_recipes() and not expand_home(space).exists():
        raise UserError(f"SPACE: comes last, and {space!r} is a recipe; write shoal tune {space} {' '.join(recipes)}")
    if not recipes:
        hint = f"; to search over the default recipe write: shoal tune digits {space}"
        raise UserError(f"RECIPE: give a recipe and a space; there is only {space!r}{hint}")
    return space, recipes


def _is_space(name: str) -> bool:
    """Whether a file says ranges, which no recipe does."""
    from shoal.tune.space import read_space

    try:
        return expand_home(name).is_file() and bool(read_space(name))
    except UserError:
        return False


def _dry_run(setup: Any) -> int:
    from shoal.recipe.yaml_tree import to_yaml
    from shoal.tune.folder import setup_tree
    from shoal.tune.view import config_words

    click.echo(to_yaml(setup_tree(setup)), nl=False)
    goes_by = ", ".join(objective.to_text() for objective in setup.objectives)
    click.echo(f"# {setup.num_trials} trials of {setup.length:g} {setup.unit}, by {goes_by}")
    proposer, shown = setup.proposer(), min(setup.num_trials, 5)
    if setup.section.search == "optuna":  # after these it goes by their results
        shown = min(shown, 2)
    for number in range(shown):
        click.echo(f"# trial {number}: {config_words(proposer.propose(number, {}))}")
    return 0


def _search(setup: Any, folder: Path, kind: str, as_json: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Search, shown as asked for; a failure is raised after the JSON line that scripts wait for."""
    from shoal.cli.main import STARTED
    from shoal.launch.interrupts import Interrupts
    from shoal.observe.logs import hide_logs, show_logs
    from shoal.tune.folder import SearchFolder
    from shoal.tune.tuning import TuneLaunch, run_search
    from shoal.tune.view import make_view

    interrupts = Interrupts(as_json=kind == "json")
    view = make_view(kind, setup, on_drawn=interrupts.tell_elsewhere)
    logs = show_logs(as_json=kind == "json")
    try:
        with interrupts as stop:
            how = TuneLaunch(view, stop, stop.enter, started=STARTED, **options)
            return run_search(setup, SearchFolder(folder), how)
    except RunError as error:
        summary = error.__dict__.get("summary")
        if summary is not None:
            _print_failed(summary, as_json)
        if (folder / "journal.jsonl").is_file():
            error.add_note(f"what there is lies in {folder}{_way_on(folder, summary or {})}")
        raise
    finally:
        view.close()
        hide_logs(logs)


def _print_failed(summary: dict[str, Any], as_json: bool) -> None:
    """What there is all the same, and where the code of a trial raised."""
    trace = next((record["traceback"] for record in summary["trials"] if record.get("traceback")), "")
    click.echo(trace, err=True, nl=False)
    if as_json or summary["best"] is not None:
        _print(summary, as_json)


def _way_on(folder: Path, summary: dict[str, Any]) -> str:
    if "metric" in str(summary.get("error", "")).partition(":")[0]:
        return "; start a new search with another --metric"
    retry = " --retry-failed" if summary.get("trials_by_status", {}).get("failed") else ""
    what = "mend the cause, then" if retry else "to go on"
    return f"; {what}: shoal tune --resume {shlex.quote(str(folder))}{retry}"


def _print(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(summary)
        return
    from rich.console import Console
    from rich.table import Table

    from shoal.observe.console import format_metric
    from shoal.tune.view import config_words

    table = Table(show_header=False, box=None, pad_edge=False)
    by_status = ", ".join(f"{count} {status}" for status, count in summary["trials_by_status"].items())
    table.add_row("status", summary["status"])
    table.add_row("trials", f"{len(summary['trials'])} of {summary['num_trials']}" + (by_status and f": {by_status}"))
    if (best := summary["best"]) is not None:
        table.add_row(summary["metric"], f"{format_metric(summary['metric'], best['value'])} ({_where(best, summary)})")
        table.add_row("settings", config_words(best["config"]))
    for number in summary.get("pareto", []):
        record = next(record for record in summary["trials"] if record["trial"] == number)
        values = "  ".join(f"{name} {format_metric(name, value)}" for name, value in record["values"].items())
        table.add_row(f"front: trial {number}", f"{values}  {config_words(record['config'])}")
    if summary["saved"] and summary["scheduler"] != "none":
        whole = summary["trained_if_all_to_the_end"]
        words = f"{summary['trained']:,.4g} of {whole:,.4g} {summary['unit']} trained; {summary['saved']:.0%} saved"
        table.add_row("compute", words)
    if summary["exploits"]:
        table.add_row("takeovers", str(summary["exploits"]))
    if summary["importance"]:
        table.add_row("matters", ", ".join(f"{key} {share:.0%}" for key, share in summary["importance"].items()))
    if best is not None:
        table.add_row("best recipe", summary["best_recipe"])
        if best.get("lineage"):
            table.add_row("best weights", str(Path(best["run_dir"]) / "checkpoints"))
    table.add_row("page", str(Path(summary["search_dir"]) / "report.html"))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    (console if console.is_terminal else Console(highlight=False, markup=False, width=500)).print(table)


def _where(best: dict[str, Any], summary: dict[str, Any]) -> str:
    """`trial 4`, and when its best was if that is not how it ended."""
    words = f"trial {best['trial']}"
    is_last = best["best_step"] in (None, best["step"])
    return words if is_last else f"{words}, at step {best['best_step']:,} of {best['step']:,}"


def _print_json(summary: dict[str, Any]) -> None:
    from shoal.core.storage import to_json_line

    print(to_json_line(json.loads(json.dumps(summary, default=str))))
    sys.stdout.flush()
