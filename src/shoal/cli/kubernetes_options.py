"""What `shoal deploy kubernetes` and `shoal submit --kubernetes` both ask about a cluster."""

import importlib
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.sizes import parse_size
from shoal.core.errors import NoDataError, UserError

if TYPE_CHECKING:
    from shoal.deploy.kubernetes.chart import Group
    from shoal.deploy.kubernetes.values import Machines
    from shoal.recipe.schema import Recipe

_OPTIONS = [
    click.option("--namespace", default="shoal", metavar="NAME", help="The namespace (default: shoal)."),
    click.option("--release", default="shoal", metavar="NAME", help="The chart's release (default: shoal)."),
    click.option("--preset", metavar="NAME", help="Values that ship: small, gpu, spot, eks."),
    click.option(
        "--values",
        "values_files",
        multiple=True,
        metavar="FILE",
        help="Values over the preset's; repeatable.",
    ),
    click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="One value of the chart; repeatable."),
    click.option(
        "--gpus-per-machine",
        type=click.IntRange(min=1),
        metavar="N",
        help="GPUs of a machine (default: as the chart's group has, or 8).",
    ),
    click.option("--gpu-memory", metavar="SIZE", help="Memory of each GPU, as in 80GiB: then it is checked."),
    click.option("--cpus", type=click.IntRange(min=1), metavar="N", help="Cores of each pod; otherwise by the recipe."),
]


def kubernetes_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """All of them."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def files_of(preset: str | None, values_files: tuple[str, ...]) -> list[Path]:
    """The files of values, that of the preset first."""
    from shoal.deploy.kubernetes.chart import preset_file

    files = [preset_file(preset)] if preset is not None else []
    for name in values_files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"--values: there is no file {name}")
        _check_values(path)
        files.append(path)
    return files


def _check_values(path: Path) -> None:
    """Whether a file holds values, as far as that shows without the chart."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--values: {path} cannot be read: {' '.join(str(error).split())}") from error
    if values is not None and not isinstance(values, dict):
        raise UserError(f"--values: {path} should hold values by their names, as in workers: {{cpu: {{cpu: 4}}}}")


def load_planning() -> None:
    """What weighs a recipe brings libraries that take seconds to import, and lose a Ctrl-C or call it an error of
    theirs: until they are there one ends the command, which has made nothing yet."""

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, b"interrupted before anything was written\n")
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    is_caught = threading.current_thread() is threading.main_thread() and before is not signal.SIG_IGN
    if is_caught:
        signal.signal(signal.SIGINT, end)
    try:
        importlib.import_module("shoal.deploy.kubernetes.need")
    finally:
        if is_caught:
            signal.signal(signal.SIGINT, before)


def workers_of(
    recipe: "Recipe", machines: "Machines", gpu_memory: str | None, there: "Mapping[str, Group]"
) -> dict[str, Any]:
    """The chart's `workers` for a recipe, among the groups that there are; what the user should know is told."""
    from shoal.deploy.kubernetes.need import need_of
    from shoal.deploy.kubernetes.values import group_values, own_group, too_large, workers_values

    name = own_group(recipe, there)
    try:
        need, warnings = need_of(recipe, gpu_memory_of(gpu_memory))
    except NoDataError as error:
        why = re.split(r" \(also looked|\. ", str(error))[0]  # what to do here is not what to do there
        what = f"how much memory workers need is not known, because the data cannot be looked at here ({why})"
        if name not in there:
            on_gpu = bool(recipe.cluster.gpus_per_worker)
            raise UserError(
                f"{what}, and the cluster has no group of machines {'with' if on_gpu else 'without'} GPUs to go by; "
                f"{'' if on_gpu else 'add --gpu, or '}say one with --preset or --set workers.NAME..., or give the "
                "command where the data are"
            ) from error
        need, warnings = None, [f"{what}; pods have as much as those of the group {name!r}"]
    group = group_values(recipe, need, machines, there.get(name))
    for warning in [*warnings, *too_large(group, name, there.get(name))]:
        click.echo(f"warning: {warning}", err=True)
    return workers_values(group, name, there)


def gpu_memory_of(text: str | None) -> int | None:
    """In bytes."""
    if text is None:
        return None
    return parse_size(text, "--gpu-memory", least=10**6, such_as="80GiB, 24GB or 512MiB")


def check_settings(namespace: str, release: str, settings: tuple[str, ...]) -> None:
    """Whether names are such, and each setting is KEY=VALUE."""
    for option, name, longest, first in (("--namespace", namespace, 63, "a-z0-9"), ("--release", release, 40, "a-z")):
        if len(name) > longest or not re.fullmatch(rf"[{first}]([-a-z0-9]*[a-z0-9])?", name):
            what = "a letter or digit" if "0" in first else "a letter"
            raise UserError(
                f"{option}: {name!r} should be at most {longest} small letters, digits and dashes, {what} first"
            )
    for setting in settings:
        if not setting.partition("=")[1] or not setting.partition("=")[0].strip():
            raise UserError(f"--set: {setting!r} should be KEY=VALUE, as in storage.runs.storageClass=efs-sc")
