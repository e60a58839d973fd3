"""`shoal runs`: what has run here, one line a run; one run in full; several side by side."""

import json
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from shoal.cli.completing import complete_run
from shoal.core.errors import UserError
from shoal.core.storage import expand_home, to_json_line
from shoal.observe.console import format_metric
from shoal.observe.runs import Run, age, curves, differing_fields, find_run, list_runs, read_events, read_run

_SPARKS = "▁▂▃▄▅▆▇█"
_ROOT = click.option("--root", default="runs", metavar="DIR", help="Where runs are (default: runs).")


@click.group("runs", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """What has run here: list (the default), show RUN, compare RUN RUN ..."""
    if context.invoked_subcommand is None:
        context.invoke(list_command)


@command.command("list")
@_ROOT
@click.option("--json", "as_json", is_flag=True, help="One JSON object a run.")
def list_command(root: str = "runs", as_json: bool = False) -> int:
    """One line a run, oldest first."""
    folder = expand_home(root)
    runs = list_runs(folder)
    if as_json:
        for run in runs:
            click.echo(to_json_line(_as_json(run)))
        return 0
    if not runs:
        click.echo(f"no runs in {folder.resolve()}; start one with: shoal train", err=True)
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("run", "status", "step", "workers", "restarts", "metrics", "started"):
        table.add_column(column, no_wrap=column == "run", overflow="fold")
    for run in runs:
        counts = (f"{run.step:,}", str(run.workers), str(run.restarts))
        table.add_row(run.name, run.status, *counts, _main_metrics(run), age(run.started))
    _console().print(table)
    return 0


@command.command("show")
@click.argument("name", metavar="RUN", shell_complete=complete_run)
@_ROOT
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show_command(name: str, root: str, as_json: bool) -> int:
    """One run: status, metrics with their curves, events."""
    run = read_run(find_run(name, expand_home(root)))
    if as_json:
        click.echo(to_json_line(_as_json(run)))
        return 0
    console = _console()
    console.print(
        f"{run.path}  {run.status}, step {run.step:,}, started {time.strftime('%F %T', time.localtime(run.started))}"
    )
    console.print(
        f"{_count(run.workers, 'worker')}, {_count(run.restarts, 'restart')}, last written {age(run.written)}"
    )
    if "verdict" in run.summary:
        console.print(run.summary["verdict"])
    table = Table(box=None, pad_edge=False)
    for column in ("metric", "first", "last", "best", "curve"):
        table.add_column(column)
    for metric, points in sorted(curves(run.path).items()):
        values = [value for _, value in points]
        best = _best(metric, values)
        table.add_row(
            metric, *(format_metric(metric, value) for value in (values[0], values[-1], best)), sparkline(values)
        )
    console.print(table)
    for event in _worth_telling(read_events(run.path))[-10:]:
        fields = {key: value for key, value in event.items() if key not in ("time", "event")}
        when = time.strftime("%T", time.localtime(event.get("time", 0)))
        console.print(f"{when}  {event.get('event')}  {json.dumps(fields)}", overflow="ellipsis", no_wrap=True)
    return 0


def _worth_telling(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but the saves that others follow: they are many, and would hide what happened in between."""
    last_save = max((number for number, event in enumerate(events) if event["event"] == "save"), default=-1)
    return [event for number, event in enumerate(events) if event["event"] != "save" or number == last_save]


@command.command("compare")
@click.argument("names", nargs=-1, required=True, metavar="RUN RUN ...", shell_complete=complete_run)
@_ROOT
@click.option("-o", "--out", metavar="FILE.html", help="Write a page with overlaid curves instead.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def compare_command(names: tuple[str, ...], root: str, out: str | None, as_json: bool) -> int:
    """Runs side by side: what differs in their recipes, and their metrics with curves."""
    if len(names) < 2:
        raise UserError("runs compare: give at least two runs")
    folders = [find_run(name, expand_home(root)) for name in names]
    if out is not None:
        return _write_page(folders, out, as_json)
    runs = [read_run(folder) for folder in folders]
    differing = differing_fields([run.recipe for run in runs])
    if as_json:
        click.echo(to_json_line({"runs": [_as_json(run) for run in runs], "recipe": differing}))
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(run.name, overflow="fold")
    table.add_row("status", *(run.status for run in runs))
    table.add_row("step", *(f"{run.step:,}" for run in runs))
    table.add_row("workers", *(str(run.workers) for run in runs))
    table.add_row("restarts", *(str(run.restarts) for run in runs))
    for field, values in differing.items():
        if field != "name":
            table.add_row(field, *(json.dumps(value) for value in values))
    all_curves = [curves(run.path) for run in runs]
    for metric in sorted({metric for found in all_curves for metric in found}):
        cells = []
        for found in all_curves:
            values = [value for _, value in found.get(metric, [])]
            cells.append(f"{format_metric(metric, values[-1])} {sparkline(values)}" if values else "-")
        table.add_row(metric, *cells)
    _console().print(table)
    return 0


def _write_page(folders: list[Path], out: str, as_json: bool) -> int:
    from shoal.cli.report import page_path
    from shoal.observe.report import write_comparison

    if as_json:
        raise UserError("runs compare: give -o FILE.html or --json, not both")
    target = page_path(out)
    try:
        write_comparison(folders, target)
    except OSError as error:
        raise UserError(f"-o: {target} cannot be written: {error.strerror or error}") from error
    click.echo(str(target))
    return 0


def sparkline(values: list[float], width: int = 24) -> str:
    """The course of a metric in one line of block characters."""
    if len(values) > width:
        values = [values[int(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[int((value - low) * scale)] for value in values)


def _best(metric: str, values: list[float]) -> float | None:
    """The best value, for what can be good or bad: not for learning rates and speeds."""
    from shoal.core.metrics import less_is_better

    if not metric.startswith("val_") and metric != "train_loss":
        return None
    return min(values) if less_is_better(metric) else max(values)


def _main_metrics(run: Run) -> str:
    shown = {name: value for name, value in run.metrics.items() if name.startswith("val_") or name == "train_loss"}
    return "  ".join(f"{name} {format_metric(name, value)}" for name, value in sorted(shown.items()))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _as_json(run: Run) -> dict[str, object]:
    return {
        "run": run.name,
        "run_dir": str(run.path),
        "status": run.status,
        "step": run.step,
        "metrics": run.metrics,
        "started": run.started,
        "written": run.written,
        "workers": run.workers,
        "restarts": run.restarts,
        "summary": run.summary,
    }


def _console() -> Console:
    # Wide when piped, so that rows stay whole for grep and awk.
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=200)
