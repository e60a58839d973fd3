"""`shoal track`: send a run to MLflow, TensorBoard and others, after the fact."""

import click

from shoal.cli.completing import complete_run
from shoal.cli.root import ROOT, runs_folder
from shoal.core.errors import UserError
from shoal.core.storage import to_json_line
from shoal.observe.runs import find_run
from shoal.recipe.merge import is_override


@click.command("track")
@click.argument("name", metavar="RUN", shell_complete=complete_run)
@click.argument("overrides", nargs=-1, metavar="[track.KEY=VALUE]...")
@ROOT
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout.")
def command(name: str, overrides: tuple[str, ...], root: str | None, as_json: bool) -> int:
    """Send what was not sent of a RUN: to where its recipe says, or to where KEY=VALUE says, or else to where it was
    sent before. Status 1 if some of it was not taken; it is still there then, and can be sent again.

    \b
    shoal track runs/mnist-20260101-120000-ab12
    shoal track mnist-2026 track.mlflow=true track.tensorboard=true
    """
    if wrong := next((word for word in overrides if not is_override(word)), None):
        raise UserError(f"track: {wrong!r} should look like track.mlflow=true")
    run_dir = find_run(name, runs_folder(root))
    from shoal.train.track import send_now

    found = send_now(run_dir, overrides)
    for sink, target in found["targets"].items():
        words = f"all is sent to {target}"
        if command := found["next"].get(sink):
            words = f"all is written to files; to send them: {command}"
        if problem := found["problems"].get(sink):
            words = f"not sent: {problem}"
        click.echo(f"{sink}: {words}", err=as_json)
    if as_json:
        click.echo(to_json_line({"run": run_dir.name, **found}))
    return 1 if found["problems"] else 0
