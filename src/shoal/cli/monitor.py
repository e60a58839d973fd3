"""`shoal monitor`: a run as it goes, in the terminal."""

import contextlib

import click

from shoal.cli.completing import complete_run
from shoal.cli.root import ROOT, runs_folder
from shoal.core.storage import to_json_line
from shoal.observe.runs import find_run


@click.command("monitor")
@click.argument("name", metavar="[RUN]", required=False, shell_complete=complete_run)
@ROOT
@click.option("--once", is_flag=True, help="Print what there is to see now, and end.")
@click.option("--json", "as_json", is_flag=True, help="The same facts as one JSON object, and end.")
def command(name: str | None, root: str | None, once: bool, as_json: bool) -> int:
    """Watch a run: curves, rates, phases, workers, failures, time left. q leaves; the run goes on.

    RUN is a path or a name; without one it is the newest that is running, else the newest. Only the files of its folder
    are read, so it may run on another machine that shares the disk.
    """
    from shoal.observe.monitor.choose import newest_run
    from shoal.observe.monitor.facts import facts_of, to_json
    from shoal.observe.monitor.screen import follow, make_console, show_once
    from shoal.observe.monitor.watch import RunWatch

    folder = runs_folder(root)
    path = newest_run(folder) if name is None else find_run(name, folder)
    if path is None:
        click.echo(f"no runs in {folder.resolve()}; start one with: shoal train", err=True)
        return 0
    watch = RunWatch(path)
    if as_json:
        watch.poll()
        click.echo(to_json_line(to_json(facts_of(watch))))
        return 0
    console = make_console()
    with contextlib.suppress(KeyboardInterrupt):  # it is how many leave
        if once or not console.is_terminal or console.is_dumb_terminal:
            show_once(watch, console)
        else:
            follow(watch, console)
    return 0
