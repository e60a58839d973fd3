"""`shoal metrics`: what Prometheus and Grafana need, and a run's metrics as Prometheus reads them."""

import shutil

import click

from shoal.cli.completing import complete_run
from shoal.cli.root import ROOT, runs_folder
from shoal.core.errors import UserError
from shoal.core.storage import expand_home


@click.group("metrics")
def command() -> None:
    """Metrics for Prometheus: the files it needs, and those of a run."""


@command.command("files")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--force", is_flag=True, help="Write over files that differ.")
def files_command(folder: str, force: bool) -> int:
    """Write what Prometheus and Grafana need into DIR.

    Scrape configuration, alerts and their tests, a dashboard, and NVIDIA's exporter of GPU metrics for Kubernetes.
    """
    from shoal.observe.prometheus.shipped_files import SHIPPED, shipped_files

    target = expand_home(folder)
    names = shipped_files()
    changed = [
        name for name in names if (target / name).exists() and (target / name).read_bytes() != names[name].read_bytes()
    ]
    if changed and not force:
        raise UserError(
            f"metrics files: {', '.join(changed)} in {target} would be overwritten; choose another folder, or --force"
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(SHIPPED / name, target / name)
            click.echo(target / name)
    except OSError as error:
        raise UserError(f"metrics files: {target} cannot be written: {error.strerror or error}") from error
    return 0


@command.command("show")
@click.argument("name", metavar="RUN", shell_complete=complete_run)
@ROOT
def show_command(name: str, root: str | None) -> int:
    """The metrics of a run, from its folder, in Prometheus's text format."""
    from shoal.observe.prometheus.exposition import render
    from shoal.observe.prometheus.folder import folder_samples
    from shoal.observe.runs import find_run

    click.echo(render(folder_samples(find_run(name, runs_folder(root)))), nl=False)
    return 0
