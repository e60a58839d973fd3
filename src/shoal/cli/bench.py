"""`shoal bench`: measures, prints a table, writes JSON and a plot."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.bench_gate import gate_command
from shoal.cli.bench_overhead import overhead_command
from shoal.cli.bench_simulate import simulate_command
from shoal.cli.bench_step import step_command
from shoal.cli.measuring import JSON, OUT, load, say, tell
from shoal.cli.tables import print_table
from shoal.cli.words import WORDS
from shoal.core.errors import UserError

if TYPE_CHECKING:
    from shoal.bench.data_side_by_side import FileSettings

_WORKERS = click.option("--workers", default=2, type=click.IntRange(1), help="Workers of each run (default: 2).")
_ROUNDS = click.option("--rounds", default=5, type=click.IntRange(1), help="Each run once in each round (default: 5).")


@click.group("bench")
def command() -> None:
    """Measure Shoal against hand-written code, side by side in one run."""


command.add_command(gate_command)
command.add_command(overhead_command)
command.add_command(simulate_command)
command.add_command(step_command)


@command.command("data")
@WORDS
@click.option("--files", type=click.Choice(["images", "tokens"]), help="Read such files, beside all peers.")
@click.option("--only", metavar="NAME,...", help="With --files: measure these alone, for example shoal_map,dataloader.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Epochs of each loader, in turns (default: 5).")
@click.option("--workers", type=click.IntRange(1), help="With --files: loader processes of each (default: one a core).")
@click.option("--samples", type=click.IntRange(1), help="With --files: how many (default: 2000 images, 50000 windows).")
@click.option("--dir", "folder", metavar="DIR", help="With --files: keep them here, and use what is here already.")
@click.option("--peers", metavar="PYTHON", help="With --files: interpreter with the peers (default: of `make peers`).")
@click.option("--train", "model", metavar="MODEL", help="Train this on images that are read, and on one batch alone.")
@OUT
@JSON
def data_command(
    words: tuple[str, ...],
    files: str | None,
    only: str | None,
    rounds: int,
    workers: int | None,
    samples: int | None,
    folder: str | None,
    peers: str | None,
    model: str | None,
    out: str,
    as_json: bool,
) -> int:
    """Samples a second of Shoal's loader against torch's DataLoader, from memory. Without RECIPE: synthetic_mlp.

    With --files: of the first epoch from files on the local disk, each contender in a process of its own: Shoal,
    torch's DataLoader, Ray Data, MosaicML Streaming and LitData; the last two are installed by `make peers`.

    With --train resnet50: how fast that trains on JPEG images from an image folder and from shards, as a share of how
    fast it trains on a batch that stays on the device; on a GPU where there is one.
    """
    if model is not None:
        return _data_train(model, rounds, workers, samples, folder, out, as_json)
    if files is not None:
        if words:
            raise UserError(f"--files: makes its own data, and takes no recipe; leave out {' '.join(words)}")
        place = Path(folder) if folder is not None else None
        from shoal.bench.data_side_by_side import FileSettings

        return _data_files(FileSettings(files, only, rounds, workers, samples, place, peers), out, as_json)
    given = {"--only": only, "--workers": workers, "--samples": samples, "--dir": folder, "--peers": peers}
    for option, value in given.items():
        if value is not None:
            raise UserError(f"{option}: is for files; add --files images or --files tokens, or leave it out")
    from shoal.bench.data import measure
    from shoal.bench.results import keep

    recipe = load(words, "synthetic_mlp").recipe
    result = measure(recipe, rounds)
    bars = {"shoal": result["shoal_samples_per_s"], "DataLoader": result["dataloader_samples_per_s"]}
    rows = [
        ("shoal", f"{result['shoal_samples_per_s']:,.0f} samples/s"),
        ("DataLoader", f"{result['dataloader_samples_per_s']:,.0f} samples/s"),
        ("ratio", f"{result['ratio']:.2f}"),
    ]
    return tell(result, rows, keep(Path(out), f"data-{recipe.name}", result, bars, "samples/s"), as_json)


def _data_train(
    model: str, rounds: int, workers: int | None, samples: int | None, folder: str | None, out: str, as_json: bool
) -> int:
    from shoal.bench.data_train import TrainSettings, measure_training, verdict
    from shoal.bench.results import keep

    place = Path(folder) if folder is not None else None
    settings = TrainSettings(model=model, rounds=rounds, workers=workers, folder=place)
    result = measure_training(replace(settings, samples=samples) if samples else settings, say)
    result["verdict"] = verdict(result)
    written = keep(Path(out), f"data-train-{model}", result, result["samples_per_s"], "samples/s")
    rows = [["", "samples/s", "to synthetic", "reading alone"]]
    for name, rate in result["samples_per_s"].items():
        ratio, alone = result["ratios"].get(name), result["reading_samples_per_s"].get(name)
        rows.append([name, f"{rate:,.0f}", f"{ratio:.1%}" if ratio else "", f"{alone:,.0f}" if alone else ""])
    print_table(rows, as_json)
    return tell(result, [("verdict", result["verdict"])], written, as_json)


def _data_files(settings: "FileSettings", out: str, as_json: bool) -> int:
    from shoal.bench.data_side_by_side import file_notes, file_table, measure_files
    from shoal.bench.results import keep

    result = measure_files(settings, say)
    bars = {name: row["rate"] for name, row in result["contenders"].items()}
    written = keep(Path(out), f"data-{settings.files}", result, bars, result["unit"])
    print_table(file_table(result), as_json)
    return tell(result, file_notes(result), written, as_json)


@command.command("scaling")
@WORDS
@click.option("--max-workers", type=click.IntRange(1), help="Measure 1, 2, ... so many (default: one a core).")
@click.option(
    "--launcher",
    type=click.Choice(["local", "torchrun", "ray"]),
    default="ray",
    help="Who starts the workers (default: ray).",
)
@click.option("--weak/--strong", "is_weak", default=True, help="Keep the batch of a worker (default), or of all.")
@click.option("--steps", default=10, type=click.IntRange(1), help="Steps that count, after a warm-up (default: 10).")
@_ROUNDS
@click.option("--peer", is_flag=True, help="Beside hand-written torchrun DDP, with two workers.")
@OUT
@JSON
def scaling_command(
    words: tuple[str, ...],
    max_workers: int | None,
    launcher: str,
    is_weak: bool,
    steps: int,
    rounds: int,
    peer: bool,
    out: str,
    as_json: bool,
) -> int:
    """Throughput, speed-up and efficiency of more and more workers, each with cores of its own. Without RECIPE:
    resnet18 on 32x32 images, 64 a worker, one thread each."""
    from shoal.bench.results import keep
    from shoal.bench.scaling import COMPUTE_BOUND, PLAIN, Settings, measure, table

    loaded = load(words, COMPUTE_BOUND)
    result = measure(loaded, Settings(max_workers, launcher, steps, rounds, is_weak, peer), say)
    names = {row["workers"]: f"{row['workers']} worker{'s' * (row['workers'] > 1)}" for row in result["workers"]}
    bars = {names[row["workers"]]: row["samples_per_s"] for row in result["workers"]}
    ideal = {name: count * bars[names[1]] for count, name in names.items()}
    if peer:
        bars[PLAIN] = result["peer"]["samples_per_s"]
    written = keep(Path(out), f"scaling-{loaded.recipe.name}", result, bars, "samples/s", ideal)
    rows = [("ratio", f"{result['peer']['ratio']:.3f} (Shoal on {launcher} / {PLAIN})")] if peer else []
    print_table(table(result), as_json)
    return tell(result, rows, written, as_json)


@command.command("startup")
@_WORKERS
@_ROUNDS
@click.option("--only", metavar="NAME,...", help="Measure only these, for example torchrun,shoal_local.")
@OUT
@JSON
def startup_command(workers: int, rounds: int, only: str | None, out: str, as_json: bool) -> int:
    """From the command to the first step, beside plain torchrun and plain Ray Train scripts."""
    from shoal.bench.commands import choose
    from shoal.bench.results import keep
    from shoal.bench.startup import CONTENDERS, budget_table, measure, table

    result = measure(workers, rounds, choose(only, CONTENDERS), say)
    written = keep(Path(out), "startup", result, result["first_step_s"], "seconds to the first step")
    print_table(table(result), as_json)
    print_table(budget_table(result), as_json)
    return tell(result, [], written, as_json)


@command.command("tune")
@click.option("--trials", default=8, type=click.IntRange(1), help="Equal trials of each search (default: 8).")
@click.option("--slots", default=2, type=click.IntRange(1), help="Trials at a time (default: 2).")
@click.option("--steps", default=10_000, type=click.IntRange(2), help="Of each trial (default: 10000).")
@click.option("--rounds", default=3, type=click.IntRange(1), help="Each search once in each round (default: 3).")
@click.option("--only", metavar="NAME,...", help="Measure only these, for example shoal,ray_tune.")
@OUT
@JSON
def tune_command(trials: int, slots: int, steps: int, rounds: int, only: str | None, out: str, as_json: bool) -> int:
    """What a search costs beside its trials, and how long each takes to start, beside Ray Tune."""
    from shoal.bench.commands import choose
    from shoal.bench.results import keep
    from shoal.bench.tune import CONTENDERS, measure, table

    result = measure(trials, slots, steps, rounds, choose(only, CONTENDERS), say)
    bars = {name: medians["ratio"] for name, medians in result["contenders"].items()}
    written = keep(Path(out), "tune", result, bars, "wall time over the best possible")
    print_table(table(result), as_json)
    return tell(result, [], written, as_json)


@command.command("restart")
@_WORKERS
@_ROUNDS
@click.option("--only", metavar="NAME,...", help="Measure only these: ray_train, shoal_local, shoal_ray.")
@OUT
@JSON
def restart_command(workers: int, rounds: int, only: str | None, out: str, as_json: bool) -> int:
    """From killing a worker to training again, beside a plain Ray Train script."""
    from shoal.bench.commands import choose
    from shoal.bench.restart import CONTENDERS, measure, table
    from shoal.bench.results import keep

    result = measure(workers, rounds, choose(only, CONTENDERS), say)
    bars = {name: took["again_s"] for name, took in result["contenders"].items()}
    written = keep(Path(out), "restart", result, bars, "seconds until training again")
    print_table(table(result), as_json)
    return tell(result, [], written, as_json)


@command.command("checkpoint")
@click.option("--sizes", default="0.1,0.5,2", metavar="GB,...", help="Sizes of the state in GB (default: 0.1,0.5,2).")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Each way to save once in each round (default: 5).")
@click.option("--saves", default=100, type=click.IntRange(2), help="Saves to see memory grow by (default: 100).")
@click.option("--gpu", is_flag=True, help="Save from a GPU (default: from the CPU's memory).")
@click.option("--dir", "folder", metavar="DIR", help="On which disk to write (default: where temporary files go).")
@OUT
@JSON
def checkpoint_command(
    sizes: str, rounds: int, saves: int, gpu: bool, folder: str | None, out: str, as_json: bool
) -> int:
    """What a save costs: how long it holds up a step, beside torch.save and async_save; how much it slows the steps
    that follow; how fast it is written and verified, beside dd; what memory it takes."""
    from shoal.bench.checkpoint import Settings, figure_table, measure, parse_sizes, stall_table
    from shoal.bench.results import keep
    from shoal.core.process import choose_device

    settings = Settings(parse_sizes(sizes), rounds, saves)
    result = measure(settings, choose_device(int(gpu)), Path(folder) if folder else None, say)
    bars = {f"{row['gb']:g} GB, {name}": took for row in result["stall"] for name, took in row["stall_s"].items()}
    written = keep(Path(out), f"checkpoint-{result['device']}", result, bars, "seconds that a save holds up training")
    print_table(stall_table(result), as_json)
    print_table(figure_table(result), as_json)
    return tell(result, [], written, as_json)


@command.command("comm")
@WORDS
@_WORKERS
@click.option("--sizes", metavar="SIZE,...", help="Sizes of the collectives (default: 4KiB, 16KiB, ... 64MiB).")
@click.option("--rounds", type=click.IntRange(1), help="Each collective once in each round (default: 5).")
@click.option("--steps", type=click.IntRange(1), help="Steps of each setting (default: 6).")
@click.option(
    "--only", metavar="NAME,...", help="Measure steps of these settings alone, for example ddp,ddp_bf16,fsdp."
)
@click.option("--quick", is_flag=True, help="Fewer sizes, rounds and steps, and a tiny model; to see that it works.")
@OUT
@JSON
def comm_command(
    words: tuple[str, ...],
    workers: int,
    sizes: str | None,
    rounds: int | None,
    steps: int | None,
    only: str | None,
    quick: bool,
    out: str,
    as_json: bool,
) -> int:
    """How fast workers exchange data, by collective and size; and the share of a step that waits for it, by strategy,
    compression and accumulation. Without RECIPE: a small vit."""
    from shoal.bench import comm
    from shoal.bench.comm_plot import draw
    from shoal.bench.commands import choose
    from shoal.bench.results import keep

    given: dict[str, Any] = {"workers": workers, "rounds": rounds, "steps": steps}
    given |= {
        "names": tuple(choose(only, list(comm.SETTINGS))),
        "sizes": comm.parse_sizes(sizes) if sizes is not None else None,
    }
    settings = comm.QUICK if quick else comm.Settings()
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    result = comm.measure(load(words, comm.TINY_VIT if quick else comm.SMALL_VIT), settings, say)
    bars = {row["name"]: 100 * row["exposed_share"] for row in result["settings"]}
    written = keep(Path(out), "comm", result, bars, "% of a step")
    for plot in written[1:]:
        draw(result, plot)
    print_table(comm.collective_table(result), as_json)
    print_table(comm.step_table(result), as_json)
    return tell(
        result, [("not measured", f"{name}: {why}") for name, why in result["not_measured"].items()], written, as_json
    )
