"""`shoal drill`: breaks a real run on purpose, and passes only if nothing was lost."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import click

from shoal.cli.words import ADDRESS, WORDS, recipes_and_overrides
from shoal.core.storage import expand_home, to_json_line

_DRILLS = {
    "kill-worker": "SIGKILL to a worker (the default).",
    "hang-worker": "A worker stops without ending.",
    "slow-worker": "A worker is slowed for some seconds; nothing may be restarted.",
    "kill-node": "A Ray node goes without a word; on a cluster that is started for this.",
    "preempt": "A Ray node is about to be taken away; on a cluster that is started for this.",
    "kill-driver": "SIGKILL to the launcher, then --resume.",
    "corrupt-checkpoint": "Ctrl-C, one bit changed in the newest checkpoint, then --resume.",
    "kill-while-saving": "SIGKILL to a worker while a checkpoint is being written.",
    "fill-disk": "The workers' disk takes nothing for a while; nothing may be restarted.",
}


def _flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """A flag for every drill."""
    for name, words in reversed(_DRILLS.items()):
        command = click.option(f"--{name}", is_flag=True, help=words)(command)
    return command


@click.command("drill")
@WORDS
@_flags
@click.option("--workers", metavar="N|MIN:MAX", help="Processes that train together (default: 2).")
@click.option(
    "--launcher",
    type=click.Choice(["auto", "local", "ray"]),
    default="auto",
    help="Who starts the processes; auto: Ray where it is installed.",
)
@ADDRESS
@click.option("--seed", type=int, default=0, help="Which worker is broken, and when (default: 0).")
@click.option("--dir", "folder", metavar="DIR", help="Where the runs go, and stay; otherwise a temporary folder.")
@click.option("--keep", is_flag=True, help="Keep the temporary folder; it is kept anyway if a drill fails.")
@click.option("--json", "as_json", is_flag=True, help="End with the result as one JSON object on stdout.")
def command(
    words: tuple[str, ...],
    workers: str | None,
    launcher: str,
    address: str | None,
    seed: int,
    folder: str | None,
    keep: bool,
    as_json: bool,
    **flags: bool,
) -> int:
    """Train a RECIPE undisturbed, then once for every drill that is asked for, break that run, and see whether it ends
    with the same weights. Status 0: nothing was lost; 1: something was.

    \b
    shoal drill digits
    shoal drill digits --kill-node --preempt --workers 1:2 train.epochs=60
    """
    from shoal.bench.drill import Request, run_drills

    has_size = any(word.startswith(("cluster.workers=", "cluster.min_workers=")) for word in words)
    recipes, overrides = recipes_and_overrides(words, workers or (None if has_size else "2"))
    request = Request(
        recipes=recipes,
        overrides=overrides,
        drills=[name for name in _DRILLS if flags[name.replace("-", "_")]] or ["kill-worker"],
        launcher=launcher,
        address=address,
        seed=seed,
        folder=expand_home(folder).absolute() if folder else None,
        keep=keep,
        say=lambda message: click.echo(message, err=True),
    )
    try:
        with _signals_end_it():
            result = run_drills(request)
    except KeyboardInterrupt:
        click.echo("interrupted; everything that the drill had started has been ended", err=True)
        return 130
    _print_table(result, as_json)
    if as_json:
        click.echo(to_json_line(result))
    return 0 if result["passed"] else 1 if any(drill["losses"] for drill in result["drills"]) else 2


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """SIGTERM and a closed terminal are as good as Ctrl-C: processes are running that must not stay behind."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_table(result: dict[str, Any], to_stderr: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("drill", "broken", "noticed", "training again", "steps lost", "workers", "weights", "result"):
        table.add_column(column, overflow="fold")
    for drill in result["drills"]:
        same = drill["same_weights"]
        table.add_row(
            drill["drill"],
            drill["broken"] or "-",
            _seconds(drill["noticed_after_s"]),
            _seconds(drill["training_again_after_s"]),
            "-" if drill["steps_lost"] is None else str(drill["steps_lost"]),
            " > ".join(map(str, drill["world_sizes"])) or "-",
            "-" if same is None else "same" if same else "differ",
            "passed" if drill["passed"] else "failed" if drill["losses"] else "not broken",
        )
    how: dict[str, Any] = {"highlight": False, "markup": False, "stderr": to_stderr}
    console = Console(**how)
    (console if console.is_terminal else Console(**how, width=200)).print(table)
    for drill in result["drills"]:
        for line in [*drill["losses"], *filter(None, [drill["nothing_broken"]])]:
            click.echo(f"{drill['drill']}: {line}", err=to_stderr)
    for compared in dict.fromkeys(filter(None, (drill["compared"] for drill in result["drills"]))):
        which = ", ".join(drill["drill"] for drill in result["drills"] if drill["compared"] == compared)
        click.echo(f"compared ({which}): {compared}", err=to_stderr)
    if result["folder"]:
        click.echo(f"the runs are in {result['folder']}", err=to_stderr)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
