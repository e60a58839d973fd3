"""`shoal checkpoints`: what is saved of a run, whether it is whole, the weights alone, and what need not be kept."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from shoal.cli.completing import complete_run
from shoal.cli.sizes import in_units, parse_size
from shoal.core.errors import UserError
from shoal.core.storage import expand_home, is_checkpoint, to_json_line
from shoal.observe.console import format_metric
from shoal.observe.runs import age, find_run

if TYPE_CHECKING:
    from shoal.checkpoint.check import Looked
    from shoal.checkpoint.prune import Pruned
    from shoal.checkpoint.section import CheckpointSection

_RUN = click.argument("name", metavar="RUN", shell_complete=complete_run)
_JSON = click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout.")
_STEP = click.option("--step", type=click.IntRange(min=0), metavar="N", help="The checkpoint of this step alone.")


@click.group("checkpoints")
def command() -> None:
    """The checkpoints of a run."""


@command.command("list")
@_RUN
@click.option("--json", "as_json", is_flag=True, help="One JSON object a checkpoint.")
def list_command(name: str, as_json: bool) -> int:
    """One line a checkpoint, oldest first."""
    from shoal.checkpoint.folder import list_checkpoints

    folder = find_run(name) / "checkpoints"
    found = list_checkpoints(folder)
    if as_json:
        for info in found:
            click.echo(to_json_line(info.to_record()))
        return 0
    if not found:
        click.echo(f"no checkpoints in {folder}", err=True)
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("step", "epoch", "size", "workers", "strategy", "metrics", "saved", "path"):
        table.add_column(column, overflow="fold")
    for info in found:
        manifest = info.manifest
        metrics = "  ".join(f"{name} {format_metric(name, value)}" for name, value in sorted(info.metrics.items()))
        facts = (f"{info.step:,}", str(manifest.epoch), in_units(info.num_bytes), str(manifest.world_size))
        table.add_row(*facts, manifest.strategy, metrics, age(manifest.time), str(info.path))
    console = Console(highlight=False, markup=False)
    (console if console.is_terminal else Console(highlight=False, markup=False, width=200)).print(table)
    return 0


@command.command("verify")
@_RUN
@_STEP
@_JSON
def verify_command(name: str, step: int | None, as_json: bool) -> int:
    """Read every byte of every checkpoint again, and change nothing. Status 1 if one is not whole.

    RUN may also be the folder of a single checkpoint.
    """
    from shoal.checkpoint.check import CORRUPT, GONE, UNREADABLE, WHOLE, look

    found = []
    for path in _chosen(name, step):
        looked = look(path)
        click.echo(_line(looked), err=as_json)
        found.append(looked)
    if as_json:
        counts = {state: sum(looked.state == state for looked in found) for state in (WHOLE, CORRUPT, UNREADABLE, GONE)}
        click.echo(to_json_line({"run": name, **counts, "checkpoints": [looked.to_record() for looked in found]}))
    return int(any(looked.state in (CORRUPT, UNREADABLE) for looked in found))


def _line(looked: "Looked") -> str:
    speed = looked.to_record()["gb_per_s"]
    size = in_units(looked.num_bytes) if looked.info else "-"
    rate = "-" if speed is None else f"{speed:.2f} GB/s"
    return f"step {looked.step:<8} {size:>12} {rate:>11}  " + f"{looked.state}: {looked.words}".removesuffix(": ")


@command.command("export")
@_RUN
@_STEP
@click.option("--best", is_flag=True, help="The best one by the recipe's checkpoint.metric; otherwise the newest.")
@click.option("-o", "output", metavar="PATH", help="A .safetensors file or a folder; otherwise RUN-step-N, here.")
@click.option("--max-shard-size", default="5GB", metavar="SIZE", help="Larger than this becomes several files (5GB).")
@click.option(
    "--dtype",
    type=click.Choice(["keep", "fp32", "bf16", "fp16"]),
    default="keep",
    help="What floating-point numbers are written as.",
)
@click.option("--force", is_flag=True, help="Replace an earlier export.")
@_JSON
def export_command(
    name: str,
    step: int | None,
    best: bool,
    output: str | None,
    max_shard_size: str,
    dtype: str,
    force: bool,
    as_json: bool,
) -> int:
    """Write the weights alone, as safetensors, with a few lines of Python that load them without Shoal.

    RUN may also be the folder of a single checkpoint.
    """
    from shoal.checkpoint.check import look_at_whole
    from shoal.checkpoint.export import Request, check_target, export

    if best and step is not None:
        raise UserError("--best: names a checkpoint, and so does --step; leave one of them out")
    max_bytes = parse_size(max_shard_size, "--max-shard-size", such_as="5GB, 500MB or 2GiB")
    paths = _chosen(name, step)
    path = _best(name) if best else paths[-1]
    run = path.parent.parent.name if path.parent.name == "checkpoints" else path.parent.name
    target = expand_home(output) if output is not None else None
    if target is not None:  # before gigabytes are read
        check_target(target, force)
    info = look_at_whole(path, "export")
    done = export(info, Request(run or "weights", target, max_bytes, dtype, force))
    code = done.loader.read_text(encoding="utf-8")
    files = f"{len(done.files)} files in {done.path}" if len(done.files) > 1 else str(done.files[0])
    click.echo(f"step {info.step}: {done.num_tensors:,} tensors, {in_units(done.num_bytes)}, in {files}", err=as_json)
    click.echo(f"loaded by {done.loader}:\n\n{code}", err=as_json, nl=False)
    if as_json:
        facts = {"run": run, "step": info.step, "path": str(done.path), "files": [str(file) for file in done.files]}
        counts = {"tensors": done.num_tensors, "bytes": done.num_bytes, "dtype": dtype}
        click.echo(to_json_line({**facts, "loader": str(done.loader), **counts}))
    return 0


@command.command("prune")
@_RUN
@click.option(
    "--keep-last", type=click.IntRange(min=1), metavar="K", help="Newest to keep; otherwise as in the recipe."
)
@click.option("--keep-best", type=click.IntRange(min=0), metavar="K", help="Best to keep; otherwise as the recipe.")
@click.option("--corrupt", is_flag=True, help="Also those that were found corrupt and set aside.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and delete nothing.")
@_JSON
def prune_command(
    name: str, keep_last: int | None, keep_best: int | None, corrupt: bool, dry_run: bool, as_json: bool
) -> int:
    """Delete the checkpoints of a run that need not be kept, and what a crash left half written.

    The newest is read first, every byte: unless it is whole, no other is deleted.
    """
    from shoal.checkpoint.prune import prune
    from shoal.observe.run_folder import RunFolder
    from shoal.observe.runs import is_locked, read_run

    run = find_run(name)
    given = {"keep_last": keep_last, "keep_best": keep_best}
    policy = _policy(run, {field: value for field, value in given.items() if value is not None})
    if policy.keep_best and policy.metric is None:
        raise UserError("--keep-best: the run's recipe has no checkpoint.metric to go by; leave this out")
    if is_locked(run) or read_run(run).status == "running":
        raise UserError(f"prune: {run} is being trained, and deletes old checkpoints itself; stop it first")
    folder = RunFolder(run)
    if not dry_run:
        folder.lock()
    try:
        pruned = prune(folder.checkpoints, policy, dry_run=dry_run, with_corrupt=corrupt)
    finally:
        folder.close()
    for line in _account(pruned, dry_run):
        click.echo(line, err=as_json)
    if as_json:
        click.echo(to_json_line({"run": run.name, "dry_run": dry_run, **pruned.to_record()}))
    return int(pruned.problem is not None)


def _account(pruned: "Pruned", dry_run: bool) -> list[str]:
    verb, freed = ("would delete", "would be freed") if dry_run else ("deleted", "freed")
    lines = [f"{verb} {removed.path}  {in_units(removed.num_bytes)}" for removed in pruned.removed]
    lines += [f"left step {step}: it is being read" for step in pruned.being_read]
    if pruned.problem is not None:
        lines.append(f"deleted no checkpoint: {pruned.problem}; --corrupt deletes it if another is whole")
    kept = ", ".join(f"{step:,}" for step in pruned.kept) or "none"
    return [*lines, f"{in_units(pruned.num_bytes)} {freed}; kept: {kept}"]


def _chosen(name: str, step: int | None) -> list[Path]:
    """The folders of the checkpoints that are asked for, oldest first; one at least."""
    from shoal.checkpoint.folder import step_folders, step_of

    if is_checkpoint(path := expand_home(name)):
        if step is not None:
            raise UserError(f"--step: {name} is a single checkpoint; leave this out, or give its run")
        return [path.absolute()]
    folder = find_run(name) / "checkpoints"
    paths = step_folders(folder)
    if not paths:
        raise UserError(f"run {name!r}: there are no checkpoints in {folder}")
    chosen = [path for path in paths if step is None or step_of(path) == step]
    if not chosen:
        steps = ", ".join(str(step_of(path)) for path in paths)
        raise UserError(f"--step: there is no checkpoint of step {step}; there are: {steps}")
    return chosen


def _best(name: str) -> Path:
    """By the metric that the run's recipe names."""
    from shoal.checkpoint.folder import list_checkpoints
    from shoal.checkpoint.retention import best_first

    run = find_run(name)
    policy = _policy(run, {})
    if policy.metric is None:
        raise UserError("--best: the run's recipe has no checkpoint.metric to go by; give --step N")
    best = best_first(list_checkpoints(run / "checkpoints"), policy.metric, policy.mode)
    if not best:
        raise UserError(f"--best: no checkpoint was saved at a step with {policy.metric}; give --step N")
    return best[0].path


def _policy(run: Path, given: dict[str, Any]) -> "CheckpointSection":
    """What the run's recipe says of keeping, and what was given over it; all else of the recipe may be out of date."""
    from pydantic import ValidationError

    from shoal.checkpoint.section import CheckpointSection
    from shoal.recipe.references import environment, resolve_references
    from shoal.recipe.yaml_tree import read_yaml

    tree, _ = read_yaml(run / "recipe.yaml")
    section = tree.get("checkpoint")
    names = ("keep_last", "keep_best", "metric", "mode")
    said = {name: section[name] for name in names if name in section} if isinstance(section, dict) else {}
    try:
        resolved, _ = resolve_references({"checkpoint": said}, environment())
        return CheckpointSection.model_validate(resolved["checkpoint"] | given)
    except ValidationError as error:
        raise UserError(f"{run / 'recipe.yaml'}: checkpoint: {error.errors()[0]['msg']}") from error
