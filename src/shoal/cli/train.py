"""`shoal train`: recipes and overrides in, a run and its summary out."""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.tables import print_table
from shoal.cli.words import ADDRESS, GPU, INIT_FROM, RESUME, WORDS, WORKERS, init_from_override, recipes_and_overrides
from shoal.core.errors import RunError, UserError
from shoal.core.secrets import scrubbed
from shoal.recipe.load import shipped_recipes

if TYPE_CHECKING:
    from shoal.launch.run import Prepared


@click.command("train")
@WORDS
@WORKERS
@GPU
@click.option(
    "--launcher",
    type=click.Choice(["auto", "local", "torchrun", "ray"]),
    default="auto",
    help="Who starts the processes; auto: Ray for several workers or an address, else this process.",
)
@ADDRESS
@click.option("--wait", "wait_s", type=click.FloatRange(min=0), default=0, metavar="S", help="Wait for a full cluster.")
@click.option("--dashboard", is_flag=True, help="Start Ray's dashboard with a Ray of our own.")
@click.option("--run-dir", metavar="DIR", help="The run's folder; otherwise runs/NAME-DATE-ID.")
@RESUME
@click.option("--or-resume", is_flag=True, help="If --run-dir holds a run, go on with it; otherwise start it there.")
@INIT_FROM
@click.option("--profile", is_flag=True, help="Record a few steps in full: a trace, and the hottest operators.")
@click.option("--profile-ranks", metavar="0,1,...|all", help="Workers that record (default: 0).")
@click.option("--json", "as_json", is_flag=True, help="End with the summary as one JSON object on stdout.")
@click.option("--log-json", is_flag=True, help="Log as JSON lines instead of a progress bar.")
@click.option("-v", "--verbose", is_flag=True, help="Show what Ray or torchrun itself has to say.")
@click.option("--dry-run", is_flag=True, help="Print the fully resolved recipe and stop.")
@click.option("--list", "list_recipes", is_flag=True, help="List the recipes that ship with Shoal and stop.")
def command(
    words: tuple[str, ...],
    workers: str | None,
    gpu: bool,
    launcher: str,
    address: str | None,
    wait_s: float,
    dashboard: bool,
    run_dir: str | None,
    resume: str | None,
    or_resume: bool,
    init_from: str | None,
    profile: bool,
    profile_ranks: str | None,
    as_json: bool,
    log_json: bool,
    verbose: bool,
    dry_run: bool,
    list_recipes: bool,
) -> int:
    """Train a RECIPE: a file, or the name of one that ships with Shoal (default: digits). Several are laid over one
    another from left to right, and KEY=VALUE overrides any field by its dotted path.

    \b
    shoal train mnist data.dir=~/data optim.lr=3e-4
    shoal train model.yaml cluster.yaml train.steps=1000 --json
    shoal train --resume runs/mnist-20260101-120000-ab12
    """
    if list_recipes:
        return _list(as_json)
    recipes, overrides = recipes_and_overrides(words, workers, gpu)
    if init_from is not None:
        if resume is not None:
            raise UserError("--init-from: a resumed run has its weights from its own checkpoint; leave this out")
        overrides.append(init_from_override(init_from, is_here=address is None))
    overrides += _profile_overrides(profile, profile_ranks)
    from shoal.launch.run import prepare

    options = {
        "launcher": launcher,
        "address": address,
        "wait_s": wait_s,
        "dashboard": dashboard,
        "verbose": verbose,
    }
    try:
        prepared = prepare(recipes, overrides, run_dir=run_dir, resume=resume, or_resume=or_resume)
        return _train(prepared, as_json, log_json, dry_run, options)
    except (Exception, KeyboardInterrupt) as error:
        if _is_told(error):
            return 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, UserError) else 1
        if not log_json or not isinstance(error, UserError | RunError):
            raise
        for line in [*str(error).splitlines(), *getattr(error, "__notes__", [])]:
            _say_json("error", line)
        return 2 if isinstance(error, UserError) else 1


def _profile_overrides(profile: bool, ranks: str | None) -> list[str]:
    """`--profile` as overrides of the recipe: what it says of `observe.profile` stays, but for the ranks."""
    if ranks is None:
        return ["observe.profile={}"] if profile else []
    if ranks == "all":
        return ["observe.profile.ranks=all"]
    parts = ranks.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UserError(f"--profile-ranks: {ranks!r} should be workers by number, counted from 0, as in 0,1; or all")
    return [f"observe.profile.ranks=[{ranks}]"]


def _is_told(error: BaseException) -> bool:
    """Whether another process that torchrun has started beside this one tells the same."""
    from shoal.launch.run import under_torchrun
    from shoal.launch.torchrun import is_told

    return under_torchrun() and is_told(error)


def _list(as_json: bool) -> int:
    recipes = shipped_recipes()
    if as_json:
        click.echo(json.dumps(recipes))
        return 0
    width = max(map(len, recipes))
    for name, words in recipes.items():
        click.echo(f"{name:{width}}  {words}")
    return 0


def _train(prepared: "Prepared", as_json: bool, log_json: bool, dry_run: bool, options: dict[str, Any]) -> int:
    from shoal.launch.run import is_silent

    if dry_run:
        if not is_silent():
            click.echo(prepared.loaded.to_yaml(), nl=False)
        return 0
    say = _say_json if log_json else _say
    if prepared.finished is not None and not is_silent():
        say(
            "warning",
            f"{prepared.run_dir} is already done; to train on, raise train.epochs or train.steps, or change early_stop",
        )
    summary = _carry_out(prepared, as_json, log_json, options)
    status = 130 if summary["status"] == "interrupted" else 0
    if is_silent():
        return status
    with contextlib.suppress(OSError):  # whoever reads may be gone (`| tee` gets a Ctrl-C too); the status still tells
        if as_json:
            _print_json(summary)
        else:
            _print_table(summary)
        if prepared.loaded.recipe.observe.profile is not None:
            _print_profiles(Path(summary["run_dir"]), as_json)
        if summary["status"] == "interrupted":
            say("warning", f"interrupted at step {summary['step']}; resume with:\n  {summary['resume']}")
    return status


def _carry_out(prepared: "Prepared", as_json: bool, log_json: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Train, shown as asked for; a failure is raised after the JSON line that scripts wait for."""
    from shoal.cli.main import STARTED
    from shoal.launch.interrupts import Interrupts
    from shoal.launch.run import Launch, is_silent, launch, under_torchrun
    from shoal.observe.console import make_console
    from shoal.observe.logs import hide_logs, show_logs
    from shoal.observe.runs import resume_command

    console = make_console("silent" if is_silent() else "json" if log_json else "auto")
    logs = show_logs(as_json=log_json)
    try:
        with Interrupts(as_json=log_json, is_silent=under_torchrun()) as stop:  # which says so itself
            return launch(prepared, Launch(console, stop, stop.enter, STARTED, **options))
    except UserError:
        raise
    except Exception as error:
        run_dir = getattr(error, "run_dir", prepared.run_dir)
        error.__dict__["hide"] = prepared.loaded.hide
        if as_json and not is_silent():
            _print_json(_failed(run_dir, prepared.loaded.hide(str(error))))
        if list((run_dir / "checkpoints").glob("step-*")):
            error.add_note(f"to go on from the last checkpoint: {resume_command(run_dir, scrubbed(options))}")
        raise
    finally:
        console.close()
        hide_logs(logs)


def _say(level: str, message: str) -> None:
    click.echo(message, err=True)


def _say_json(level: str, message: str) -> None:
    from shoal.core.storage import to_json_line

    record = {"time": time.time(), "event": "log", "level": level, "logger": "shoal", "message": message}
    click.echo(to_json_line(record), err=True)


def _failed(run_dir: Path, error: str) -> dict[str, Any]:
    """The summary that the worker left, or a short one where it failed before there was anything to sum up."""
    from shoal.observe.runs import read_run

    short = {"run": run_dir.name, "run_dir": str(run_dir), "status": "failed", "error": error}
    left = read_run(run_dir).summary if run_dir.is_dir() else {}
    # A worker's error says which worker it was; the summary says only what.
    is_of_this = left.get("status") == "failed" and bool(left.get("error")) and error.endswith(left["error"])
    return left if is_of_this else short


def _print_json(summary: dict[str, Any]) -> None:
    from shoal.core.storage import to_json_line

    print(to_json_line(summary))
    sys.stdout.flush()


def _print_table(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from shoal.observe.console import format_metric

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("status", summary["status"])
    table.add_row("steps", f"{summary['step']:,} ({summary['epoch']:g} epochs)")
    for name, value in sorted(summary["metrics"].items()):
        table.add_row(name, format_metric(name, value))
    for name in ("samples_per_s", "tokens_per_s"):
        if name in summary:
            table.add_row(name, format_metric(name, summary[name]))
    if summary["time_to_first_step_s"] is not None:
        table.add_row("time to first step", f"{summary['time_to_first_step_s']:.1f} s")
    if skipped := summary.get("data", {}).get("skipped"):
        table.add_row("not read", f"{skipped:,} times a sample was left out; the first are named in summary.json")
    if "ledger" in summary:  # which a run of an earlier version has not
        table.add_row("goodput", _goodput(summary["ledger"]))
    table.add_row("verdict", summary["verdict"])
    table.add_row("weights", str(summary["weights_sha256"])[:16])
    table.add_row("run", summary["run_dir"])
    console = Console(highlight=False, markup=False, soft_wrap=True)
    # Wide when piped, so that rows stay whole for grep and awk.
    (console if console.is_terminal else Console(highlight=False, markup=False, width=500)).print(table)


def _goodput(ledger: dict[str, Any]) -> str:
    """`81.2% of 2.4 worker-hours were steps that count; all of them cost 6.96`, where there is a price."""
    hours, unit = ledger["worker_s"] / 3600, "worker-hours"
    if hours < 0.1:
        hours, unit = ledger["worker_s"], "worker-seconds"
    cost = f"; all of them cost {ledger['cost']['total']:,.2f}" if "cost" in ledger else ""
    return f"{ledger['goodput']:.1%} of {hours:,.1f} {unit} were steps that count{cost}"


def _print_profiles(run_dir: Path, as_json: bool) -> None:
    """The hottest operators, and what to open; not on stdout where that ends with the JSON line."""
    from shoal.train.profile_table import operator_table, read_profiles
    from shoal.train.profiling import FOLDER

    for record in read_profiles(run_dir):
        click.echo(err=as_json)
        print_table(operator_table(record), as_json)
    for trace in sorted((run_dir / FOLDER).glob("rank-*.trace.json.gz")):
        click.echo(f"trace: {trace} (open it at https://ui.perfetto.dev)", err=as_json)
