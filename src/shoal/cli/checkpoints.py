"""`shoal checkpoints`: what is saved of a run."""

import click
from rich.console import Console
from rich.table import Table

from shoal.cli.completing import complete_run
from shoal.core.storage import to_json_line
from shoal.observe.console import format_metric
from shoal.observe.runs import age, find_run


@click.group("checkpoints")
def command() -> None:
    """The checkpoints of a run."""


@command.command("list")
@click.argument("name", metavar="RUN", shell_complete=complete_run)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a checkpoint.")
def list_command(name: str, as_json: bool) -> int:
    """One line a checkpoint, oldest first."""
    from shoal.checkpoint.store import list_checkpoints

    folder = find_run(name) / "checkpoints"
    found = list_checkpoints(folder)
    if as_json:
        for info in found:
            row = {"step": info.step, "epoch": info.epoch, "path": str(info.path), "bytes": info.num_bytes}
            click.echo(to_json_line(row | {"time": info.time, "metrics": dict(info.metrics)}))
        return 0
    if not found:
        click.echo(f"no checkpoints in {folder}", err=True)
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("step", "epoch", "size", "metrics", "saved", "path"):
        table.add_column(column, overflow="fold")
    for info in found:
        metrics = "  ".join(f"{name} {format_metric(name, value)}" for name, value in sorted(info.metrics.items()))
        size = f"{info.num_bytes / 1e6:,.1f} MB"
        table.add_row(f"{info.step:,}", str(info.epoch), size, metrics, age(info.time), str(info.path))
    console = Console(highlight=False, markup=False)
    (console if console.is_terminal else Console(highlight=False, markup=False, width=200)).print(table)
    return 0
