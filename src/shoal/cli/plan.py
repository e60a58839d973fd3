"""`shoal plan`: what a recipe will need, before machines are asked for; and whether that is true."""

from typing import TYPE_CHECKING, Any

import click

from shoal.cli.sizes import parse_size
from shoal.cli.words import ADDRESS, GPU, WORDS, WORKERS, recipes_and_overrides
from shoal.core.errors import UserError
from shoal.core.secrets import scrub
from shoal.core.storage import to_json_line
from shoal.parallel.sizes import PARTS
from shoal.recipe.load import load_recipe

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.launch.room import Room
    from shoal.recipe.load import LoadedRecipe
    from shoal.recipe.schema import Recipe
    from shoal.train.advise import Outcome
    from shoal.train.forecast import Forecast


@click.command("plan")
@WORDS
@click.option(
    "--gpu-memory", metavar="SIZE", help="Memory of each worker's GPU, as in 80GiB; otherwise this machine's."
)
@WORKERS
@GPU
@ADDRESS
@click.option("--check", is_flag=True, help="Take a few real steps here, and compare.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout.")
def command(
    words: tuple[str, ...],
    gpu_memory: str | None,
    workers: str | None,
    gpu: bool,
    address: str | None,
    check: bool,
    as_json: bool,
) -> int:
    """What a RECIPE will need of each worker under every strategy: memory by part, the micro-batch that fits, bytes
    sent in a step; and what parallel.strategy=auto takes. With --address, whether that cluster has room for the
    workers. Nothing is trained or written; data is downloaded only where its shapes must be looked up.

    \b
    shoal plan gpt2 --gpu-memory 80GiB --workers 8
    shoal plan gpt2 --gpu-memory 80GiB --workers 8 --address auto
    shoal plan my.yaml train.precision=bf16 --check
    """
    from shoal.train.forecast import forecast, memory_of_worker, with_host_notes

    recipes, overrides = recipes_and_overrides(words, workers, gpu)
    loaded = load_recipe(recipes, overrides)
    recipe = loaded.recipe
    of_gpu = None
    if gpu_memory is not None:
        of_gpu = parse_size(gpu_memory, "--gpu-memory", least=10**6, such_as="80GiB, 24GB or 512MiB")
    if check:
        _check_machine(recipe)
    room = _ask_for_room(recipe, address) if address is not None else None  # what is wrong with it shows at once
    found = forecast(recipe, *memory_of_worker(recipe, of_gpu))
    if of_gpu is None:
        found = with_host_notes(found)
    record = found.to_record()
    _print(found, as_json)
    if room is not None and address is not None:
        record["cluster"] = room.to_record()
        _print_room(room, address, as_json)
    is_right = True
    if check:
        compared = _check(loaded, found.on_gpu, as_json)
        record, is_right = record | {"check": compared}, compared["agrees"]
    if as_json:
        click.echo(to_json_line(record))
    return 0 if is_right else 1


def _print(found: "Forecast", to_stderr: bool) -> None:
    from shoal.train.advise import in_gib, to_take

    recipe, where = found.recipe, "GPU" if found.on_gpu else "CPU"
    workers = f"{recipe.cluster.workers} worker{'s' * (recipe.cluster.workers > 1)}"
    usable = f"{in_gib(found.memory)} of memory each, of which tensors may take {in_gib(found.usable)}"
    click.echo(f"{recipe.name}: {found.parameters:,} parameters, {workers} on {where}s with {usable}", err=to_stderr)
    click.echo(f"a step: {recipe.train.global_batch} samples, {recipe.train.precision}", err=to_stderr)
    table = _table("strategy", *PARTS, "total", "in host", "micro-batch", "accumulation", "sent", "fits")
    for outcome in found.outcomes:
        if outcome.problem is None:
            table.add_row(*_cells(outcome))
    _show(table, to_stderr)
    for outcome in found.outcomes:
        if outcome.problem is not None:
            click.echo(f"{outcome.option.label}: not possible: {outcome.problem}", err=to_stderr)
    chosen = found.choice
    because = f"{chosen.outcome.option.label}, because" if chosen.outcome.problem is None else "not possible:"
    click.echo(f"auto: {because} {chosen.why}", err=to_stderr)
    if chosen.outcome.problem is None and not (chosen.outcome.option.is_own and chosen.outcome.is_own_micro_batch):
        click.echo(f"the same in words of a recipe: {to_take(chosen.outcome)}", err=to_stderr)
    for line in [*filter(None, [chosen.hint]), *found.notes]:
        click.echo(line, err=to_stderr)


def _cells(outcome: "Outcome") -> list[str]:
    memory = outcome.memory
    sizes = [_in_units(getattr(memory, part)) for part in PARTS]
    own = " (recipe)" if outcome.option.is_own else ""
    micro_batch = str(outcome.micro_batch) + ("" if outcome.is_own_micro_batch else " (set it)")
    host = _in_units(memory.host) if memory.host else "-"
    sent = _in_units(outcome.sent) if outcome.sent else "-"
    counts = [micro_batch, str(outcome.micro_batches)]
    fits = "yes" if outcome.fits else "no"
    return [outcome.option.label + own, *sizes, _in_units(memory.total), host, *counts, sent, fits]


def _ask_for_room(recipe: "Recipe", address: str) -> "Room":
    from shoal.launch.room import room_on

    return room_on(address, recipe)


def _print_room(room: "Room", address: str, as_json: bool) -> None:
    size = ", ".join(f"{amount:g} {name}" for name, amount in room.per_worker.items())
    there = f"{room.workers} workers of {size} fit on {room.machines} of its machines, at most {room.free} of them now"
    click.echo(f"cluster at {scrub(address)}: {room.obstacle or 'has room'}; {there}", err=as_json)


def _check_machine(recipe: "Recipe") -> None:
    """Refuse to check what this machine has too little for, before anything is computed."""
    import torch

    from shoal.core.machine import usable_cores

    workers, wants_gpu, gpus = recipe.cluster.workers, recipe.cluster.gpus_per_worker, torch.cuda.device_count()
    if wants_gpu and not gpus:
        raise UserError(
            "--check: takes steps here, and there is no GPU here; leave it out, or set cluster.gpus_per_worker=0"
        )
    if wants_gpu != 0 and 0 < gpus < workers:
        raise UserError(
            f"--check: takes steps here, and {workers} workers need a GPU each, of which there are {gpus}; give fewer "
            "--workers, or set cluster.gpus_per_worker=0"
        )
    if workers > usable_cores():
        raise UserError(
            f"--check: takes steps here, and {workers} workers are more than the {usable_cores()} cores of this "
            "machine; leave it out, or give fewer --workers"
        )


def _check(loaded: "LoadedRecipe", is_for_gpu: bool, as_json: bool) -> dict[str, Any]:
    from shoal.bench.plan_check import HOST_SLACK, SLACK, TOLERANCE, compare
    from shoal.train.advise import in_gib
    from shoal.train.forecast import forecast, memory_of_worker, too_little_host

    here = forecast(loaded.recipe, *memory_of_worker(loaded.recipe))
    own = here.own
    if own.problem is not None:
        raise UserError(own.problem)
    if not own.fits:
        raise UserError(
            f"--check: {own.option.label} does not fit on this machine, where a worker can use {in_gib(here.usable)} "
            f"and needs {in_gib(own.memory.total)}; leave it out, or check with a smaller model or train.global_batch"
        )
    if problem := too_little_host(own, loaded.recipe.cluster.workers):
        raise UserError(f"--check: {problem}; leave it out, or check with a smaller model")
    device = "GPU" if here.on_gpu else "CPU"
    other = "; what stands above is for GPUs" if is_for_gpu and not here.on_gpu else ""
    click.echo(f"check: a few steps of {own.option.label} on this machine's {device}{other}", err=True)
    compared = compare(loaded, own)
    table = _table("check", "predicted", "measured", "difference")
    for part, row in compared["parts"].items():
        difference = f"{100 * row['difference']:+.1f}%" if row["difference"] is not None else "-"
        table.add_row(part, _in_units(row["predicted_bytes"]), _in_units(row["measured_bytes"]), difference)
    _show(table, as_json)
    click.echo(f"measured: {compared['how']}", err=as_json)
    if compared["step_s"] is not None:
        click.echo(f"a step took {_in_seconds(compared['step_s'])}, the fastest of {compared['steps']}", err=as_json)
    in_host = f" (in host: {in_gib(HOST_SLACK)})" if "in host" in compared["parts"] else ""
    bound = f"{TOLERANCE:.0%}, or {in_gib(SLACK)}{in_host} where that is more"
    wrong = " and ".join(compared["off"])
    verdict = f"as foreseen, within {bound}" if not wrong else f"not as foreseen: {wrong} off by more than {bound}"
    click.echo(f"check: {verdict}", err=as_json)
    return compared


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="right" if number else "left")
    return table


def _show(table: "Table", to_stderr: bool) -> None:
    from rich.console import Console

    how: dict[str, Any] = {"highlight": False, "markup": False, "stderr": to_stderr}
    console = Console(**how)
    (console if console.is_terminal else Console(**how, width=200)).print(table)


def _in_seconds(seconds: float) -> str:
    """`8.1 s`, `270 ms`"""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _in_units(size: int) -> str:
    """`1.25 GiB`, `12.3 MiB`"""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
