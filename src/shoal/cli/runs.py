"""`shoal runs`: what has run here, one line a run; one run in full; several side by side."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from shoal.cli.completing import complete_run
from shoal.cli.root import ROOT, runs_folder
from shoal.core.errors import UserError
from shoal.core.storage import to_json_line
from shoal.observe.console import format_metric
from shoal.observe.runs import Run, age, differing_fields, find_run, list_runs


@click.group("runs", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """What has run here: list (the default), show RUN, compare RUN RUN ..."""
    if context.invoked_subcommand is None:
        context.invoke(list_command)


@command.command("list")
@ROOT
@click.option("--json", "as_json", is_flag=True, help="One JSON object a run.")
def list_command(root: str | None = None, as_json: bool = False) -> int:
    """One line a run, oldest first."""
    folder = runs_folder(root)
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
@ROOT
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show_command(name: str, root: str | None, as_json: bool) -> int:
    """One run: status, verdict, where its time went, metrics with their curves, events."""
    from shoal.cli.run_tables import event_lines, headline, ledger_table, metric_table, phase_table
    from shoal.observe.report.folder import read_folder
    from shoal.observe.report.outcome import outcome_of, phases_of

    folder = read_folder(find_run(name, runs_folder(root)))
    if as_json:
        ledger = folder.ledger.to_record(folder.price_per_hour)
        more = {"ledger": ledger, "phases": phases_of(folder)}
        click.echo(to_json_line(_as_json(folder.run) | outcome_of(folder) | more))
        return 0
    console = _console()
    for line in headline(folder):
        console.print(line)
    for table in (ledger_table(folder), phase_table(folder), metric_table(folder)):
        if table is not None and table.row_count:
            console.print()
            console.print(table)
    lines = event_lines(folder.events)
    for line in ["", *lines] if lines else []:
        console.print(line, overflow="ellipsis", no_wrap=True)
    return 0


@command.command("compare")
@click.argument("names", nargs=-1, required=True, metavar="RUN RUN ...", shell_complete=complete_run)
@ROOT
@click.option("-o", "--out", metavar="FILE.html", help="Write a page with overlaid curves instead.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def compare_command(names: tuple[str, ...], root: str | None, out: str | None, as_json: bool) -> int:
    """Runs side by side: how they went, what differs in their recipes, and their metrics with curves."""
    from shoal.cli.run_tables import comparison_table
    from shoal.observe.report.folder import read_folder
    from shoal.observe.report.outcome import outcome_of

    if len(names) < 2:
        raise UserError("runs compare: give at least two runs")
    paths = [find_run(name, runs_folder(root)) for name in names]
    if out is not None:
        return _write_page(paths, out, as_json)
    folders = [read_folder(path) for path in paths]
    if as_json:
        differing = differing_fields([folder.run.recipe for folder in folders])
        runs = [_as_json(folder.run) | outcome_of(folder) for folder in folders]
        click.echo(to_json_line({"runs": runs, "recipe": differing}))
        return 0
    _console().print(comparison_table(folders))
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


def _main_metrics(run: Run) -> str:
    shown = {name: value for name, value in run.metrics.items() if name.startswith("val_") or name == "train_loss"}
    return "  ".join(f"{name} {format_metric(name, value)}" for name, value in sorted(shown.items()))


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
