"""`shoal deploy`: the files that a cluster is started from."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from shoal.cli.kubernetes_options import check_settings, files_of, kubernetes_options, load_planning, workers_of
from shoal.cli.words import GPU, WORDS, WORKERS, recipes_and_overrides
from shoal.core.errors import UserError


@click.group("deploy")
def command() -> None:
    """Files to start a cluster from. Nothing is started, and nothing is sent anywhere."""


@command.command("kubernetes")
@WORDS
@WORKERS
@GPU
@kubernetes_options
@click.option("--values-only", is_flag=True, help="The values for helm install, instead of what it would apply.")
@click.option("-o", "--output", metavar="FILE", help="Where to write it; otherwise to stdout.")
def kubernetes(
    words: tuple[str, ...],
    workers: str | None,
    gpu: bool,
    namespace: str,
    release: str,
    preset: str | None,
    values_files: tuple[str, ...],
    settings: tuple[str, ...],
    gpus_per_machine: int | None,
    gpu_memory: str | None,
    cpus: int | None,
    values_only: bool,
    output: str | None,
) -> int:
    """A cluster for KubeRay, with as many workers as a RECIPE wants and as much memory as its plan says; without a
    RECIPE, as the preset says.

    \b
    shoal deploy kubernetes --preset small | kubectl apply -f -
    shoal deploy kubernetes gpt2 --workers 16 --gpu --preset gpu --set storage.runs.storageClass=efs-sc -o cluster.yaml
    shoal deploy kubernetes gpt2 --workers 16 --gpu --values-only -o values.yaml
    """
    from shoal.core.plain_yaml import dump
    from shoal.deploy.kubernetes.chart import check, install_command, installed, laid_over, render
    from shoal.deploy.kubernetes.values import Machines
    from shoal.recipe.load import load_recipe

    check_settings(namespace, release, settings)
    files = files_of(preset, values_files)
    values = {}
    if words or workers or gpu:
        recipe = load_recipe(*recipes_and_overrides(words, workers, gpu)).recipe
        load_planning()
        there = installed(release, namespace, files, settings).groups
        values = {"workers": workers_of(recipe, Machines(gpus_per_machine, cpus), gpu_memory, there)}
    elif cpus is not None or gpu_memory is not None or gpus_per_machine is not None:
        raise UserError(
            "--cpus, --gpu-memory, --gpus-per-machine: are about the workers of a recipe; give one, or use "
            "--set workers..."
        )
    if values_only:
        check(release, namespace, values, files, settings)
        text = dump(laid_over(files, values))
    else:
        text = render(release, namespace, {"namespace": {"create": True}, **values}, files, settings)
    write(text, output)
    if values_only and settings and output is None:
        click.echo("note: what --set says is not among these values; say it to helm install too", err=True)
    if output is not None:
        apply = f"kubectl apply -f {shlex.quote(output)}"
        follow = install_command(release, namespace, output, settings) if values_only else apply
        click.echo(f"written to {output}; next: {follow}", err=True)
    return 0


@command.command("docker")
@click.option("-o", "--output", required=True, metavar="DIR", help="The folder to write; a new one, or one of before.")
def docker(output: str) -> int:
    """A cluster on this machine for Docker Compose: a head, two workers, MLflow, Prometheus and Grafana.

    \b
    shoal deploy docker -o my-cluster && cd my-cluster && head compose.yaml
    """
    from shoal.core.version import VERSION
    from shoal.deploy.docker import files

    folder = _folder(output)
    with _in_words(output):
        for name, text in files().items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    build = f"docker build -f deploy/docker/Dockerfile -t localhost/shoal:{VERSION} ."
    click.echo(f"written to {output}; next, unless you have the image, from the top of a checkout: {build}", err=True)
    click.echo(f"then: cd {shlex.quote(str(folder.resolve()))}, and the lines at the top of compose.yaml", err=True)
    return 0


@command.command("aws")
@WORDS
@WORKERS
@GPU
@click.option("--name", default="shoal", metavar="NAME", help="The cluster's name (default: shoal).")
@click.option("--region", default="us-west-2", metavar="REGION", help="Default: us-west-2.")
@click.option("--instance-type", metavar="TYPE", help="Machines that train; otherwise the smallest that fits.")
@click.option("--machine-cpus", type=click.IntRange(min=1), metavar="N", help="Of a type that Shoal does not know.")
@click.option("--machine-gpus", type=click.IntRange(min=0), metavar="N", help="Likewise.")
@click.option("--min-machines", type=click.IntRange(min=0), default=0, metavar="N", help="Kept even when idle.")
@click.option("--max-machines", type=click.IntRange(min=1), metavar="N", help="Otherwise as many as all workers need.")
@click.option("--spot", is_flag=True, help="Spot machines for the workers; the head is never one.")
@click.option("--efs", metavar="ID", help="The EFS file system that all machines mount at /shared.")
@click.option("--image", metavar="AMI", help="Ubuntu's, for GPUs with a driver; needed unless there is --head-profile.")
@click.option("--security-group", metavar="ID", help="One of yours; otherwise Ray makes one.")
@click.option("--head-profile", metavar="ARN", help="The head's instance profile; otherwise Ray makes one.")
@click.option("-o", "--output", metavar="FILE", help="Where to write it; otherwise to stdout.")
def aws(
    words: tuple[str, ...], workers: str | None, gpu: bool, output: str | None, **options: str | int | bool | None
) -> int:
    """A `ray up` file for machines of AWS, as many and as large as a RECIPE's workers want.

    \b
    shoal deploy aws gpt2 --workers 1:16 --gpu --spot --efs fs-0123456789abcdef0 --image ami-0123456789abcdef0 \\
      -o cluster.yaml && ray up cluster.yaml
    """
    from shoal.deploy.aws import cluster_file, to_text
    from shoal.deploy.aws_machines import AwsOptions
    from shoal.recipe.load import load_recipe

    recipes, overrides = recipes_and_overrides(words, workers, gpu)
    recipe = load_recipe(recipes, overrides).recipe
    contents = cluster_file(recipe, AwsOptions(**options))  # type: ignore[arg-type] # the fields are named as the options
    write(to_text(contents, f"For {recipe.name}; docs/machines.md tells what is in it."), output)
    if options["efs"] is None:
        lost = "no /shared: take --run-dir /home/ubuntu/runs/first, which goes with the machine that trains"
        remedy = "; to keep it, give --efs, or checkpoint.upload_to=s3://BUCKET/FOLDER"
        kept = "" if recipe.checkpoint.upload_to else remedy
        click.echo(f"warning: --efs: is not given, so there is {lost}{kept}", err=True)
    if output is not None:
        click.echo(f"written to {output}; next, from the top of a checkout: ray up {shlex.quote(output)}", err=True)
    return 0


def _folder(output: str) -> Path:
    """A folder that is new, or holds nothing, or what `shoal deploy docker` wrote there before."""
    from shoal.deploy.docker import is_ours

    if not output.strip():
        raise UserError("--output: is empty; give the name of a folder")
    folder = Path(output).expanduser()
    compose = folder / "compose.yaml"
    if folder.is_file():
        raise UserError(f"--output: {output} is a file; give the name of a folder")
    with _in_words(output):
        if compose.exists() and not is_ours(compose):
            raise UserError(f"--output: {output} holds a compose.yaml that is not Shoal's; give a new folder")
        if folder.is_dir() and any(folder.iterdir()) and not compose.exists():
            raise UserError(f"--output: {output} holds other things; give a new folder")
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _in_words(output: str) -> Iterator[None]:
    """A place that cannot be written to is wrong input."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--output: {output} cannot be written: {error.strerror or error}") from error


def write(text: str, output: str | None) -> None:
    """To a file, or to stdout."""
    if output is None:
        click.echo(text, nl=False)
        return
    path = Path(output).expanduser()
    if not path.parent.is_dir():
        raise UserError(f"--output: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"--output: {output} is a folder; give the name of a file")
    with _in_words(output):
        path.write_text(text, encoding="utf-8")
