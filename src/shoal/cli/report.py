"""`shoal report`: a run as one page."""

from pathlib import Path

import click

from shoal.cli.completing import complete_run
from shoal.cli.root import ROOT, runs_folder
from shoal.core.errors import UserError
from shoal.core.storage import expand_home
from shoal.observe.runs import find_run


@click.command("report")
@click.argument("name", metavar="RUN", shell_complete=complete_run)
@click.option("-o", "--out", metavar="FILE.html", help="Where to write it (default: report.html in the run's folder).")
@ROOT
def command(name: str, out: str | None, root: str | None) -> int:
    """Write a run as one HTML page that needs no network: verdict, ledger, curves, workers, failures, recipe.

    A run that still goes on is written as it is now. The folder of a search is taken too.
    """
    from shoal.observe.report import write_report
    from shoal.tune.folder import is_search

    search = expand_home(name) if is_search(expand_home(name)) else None
    folder = search or find_run(name, runs_folder(root))
    target = folder / "report.html" if out is None else page_path(out)
    try:
        if search is not None:
            from shoal.tune.tuning import write_again

            write_again(search, target)
        else:
            write_report(folder, target)
    except OSError as error:
        raise UserError(f"{'-o' if out else 'RUN'}: {target} cannot be written: {error.strerror or error}") from error
    click.echo(str(target))
    return 0


def page_path(out: str) -> Path:
    """Where a page is to be written, as the user says it."""
    target = expand_home(out)
    if target.is_dir():
        raise UserError(f"-o: {out} is a folder; give a file, as in {target / 'report.html'}")
    if not target.parent.is_dir():
        raise UserError(f"-o: {target.parent} is not a folder; make it first")
    return target
