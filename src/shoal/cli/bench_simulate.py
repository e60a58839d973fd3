"""`shoal bench simulate`: how far a model scales on machines that are not here."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.measuring import JSON, OUT, load, say, tell
from shoal.cli.tables import print_table
from shoal.cli.words import WORDS
from shoal.core.errors import UserError

if TYPE_CHECKING:
    from shoal.recipe.load import LoadedRecipe

_FIGURES = {
    "--inside-gb-per-s": "What a GPU sends inside of its machine, in GB/s.",
    "--between-gb-per-s": "What a network card sends to other machines, in GB/s.",
    "--inside-us": "Latency from GPU to GPU, in microseconds.",
    "--between-us": "Latency from machine to machine, in microseconds.",
}


def _figures(function: Any) -> Any:
    for name, words in reversed(_FIGURES.items()):
        function = click.option(name, type=float, help=words)(function)
    return function


@click.command("simulate")
@WORDS
@click.option("--network", help="nvlink+ib (default), nvlink+100gbe, pcie+100gbe, free, or a file NAME.yaml.")
@_figures
@click.option("--gpus-per-node", type=click.IntRange(1, 1024), help="GPUs of a machine (default: 8).")
@click.option("--max-gpus", type=click.IntRange(1, 65536), help="Simulate 1, 2, 4, ... so many (default: 1024).")
@click.option("--only", metavar="NAME,...", help="Only these strategies, for example ddp,fsdp.")
@click.option("--step-ms", metavar="MS", help="A step of one GPU, or FORWARD,BACKWARD,OPTIMIZER: nothing is measured.")
@click.option("--step-from", metavar="RUN|FILE", help="The same from a run of one worker, or a result of bench step.")
@click.option("--check", "checks", is_flag=True, help="Compare with real runs of 2 and 4 workers on this machine.")
@click.option("--workers", metavar="N,...", help="With --check: only so many, 2 or 4.")
@click.option("--rounds", type=click.IntRange(1), help="With --check: everything anew in each round (default: 5).")
@click.option("--steps", type=click.IntRange(1), help="Steps to measure, of each strategy (default: 10; --check: 6).")
@OUT
@JSON
def simulate_command(words: tuple[str, ...], out: str, as_json: bool, **given: Any) -> int:
    """Predict step time and efficiency for 1 to 1024 GPUs under ddp, fsdp, hsdp and compression, each GPU keeping its
    batch. A step of one worker is measured here, or given; the network is a model. Without RECIPE: a small vit.

    With --check: predict real runs of 2 and 4 workers on this machine's CPUs. Status 1 where one is off by over 15%.

    \b
    shoal bench simulate gpt2 data.dir=DIR train.global_batch=48 --step-ms 130.3 --network nvlink+100gbe
    """
    from shoal.bench.simulate_recipes import SIMULATED

    _check_together(given)
    loaded = load(words, SIMULATED)
    return (_check if given["checks"] else _simulate)(loaded, given, Path(out), as_json)


def _check_together(given: dict[str, Any]) -> None:
    """Refuse options that would be of no effect."""
    figures = [name.removeprefix("--").replace("-", "_") for name in _FIGURES]
    of_check = ("workers", "rounds")
    of_simulation = ("network", *figures, "gpus_per_node", "max_gpus", "step_ms", "step_from")
    for name in of_simulation if given["checks"] else of_check:
        if given[name] is not None:
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{option}: --check measures the network and the steps of this machine; leave it out"
                if given["checks"]
                else f"{option}: is for --check; add that, or leave it out"
            )
    if given["step_ms"] is not None and given["step_from"] is not None:
        raise UserError("--step-ms: and --step-from both say what a step takes; give one of them")


def _simulate(loaded: "LoadedRecipe", given: dict[str, Any], out: Path, as_json: bool) -> int:
    from shoal.bench import simulate
    from shoal.bench.commands import choose
    from shoal.bench.results import keep
    from shoal.bench.simulate_given import from_place, from_words
    from shoal.bench.simulate_network import find_network
    from shoal.bench.simulate_plan import STRATEGIES
    from shoal.bench.simulate_plot import draw

    figures = {name.removeprefix("--").replace("-", "_"): None for name in _FIGURES}
    network = find_network(given["network"] or "nvlink+ib", {name: given[name] for name in figures})
    only = given["only"]
    chosen: dict[str, Any] = {
        "network": network,
        "strategies": tuple(choose(only, STRATEGIES)) if only is not None else None,
        "given": from_words(given["step_ms"]) if given["step_ms"] is not None else None,
        **{name: given[name] for name in ("gpus_per_node", "max_gpus", "steps")},
    }
    if given["step_from"] is not None:
        chosen["given"] = from_place(given["step_from"])
    settings = simulate.Settings(**{name: value for name, value in chosen.items() if value is not None})
    result = simulate.simulate(loaded, settings, say)
    bars = {name: 100 * simulate.efficiencies(result, name)[-1] for name in settings.strategies}
    written = keep(out, f"simulate-{loaded.recipe.name}", result, bars, "% efficiency")
    for plot in written[1:]:
        draw(result, plot)
    print_table(simulate.table(result), as_json)
    return tell(result, simulate.notes(result), written, as_json)


def _check(loaded: "LoadedRecipe", given: dict[str, Any], out: Path, as_json: bool) -> int:
    from shoal.bench import simulate_check
    from shoal.bench.commands import choose
    from shoal.bench.results import keep
    from shoal.bench.simulate_plot import draw_check

    chosen: dict[str, Any] = {name: given[name] for name in ("rounds", "steps")}
    if given["workers"] is not None:
        chosen["workers"] = _counts(given["workers"], list(simulate_check.CHECKED))
    if given["only"] is not None:
        chosen["strategies"] = tuple(choose(given["only"], simulate_check.CHECKED[4]))
    settings = simulate_check.CheckSettings(**{name: value for name, value in chosen.items() if value is not None})
    if not any(map(settings.checked, settings.workers)):
        raise UserError("--only: hsdp takes 4 workers, and --workers leaves these out")
    result = simulate_check.check(loaded, settings, say)
    bars = {f"{row['strategy']}, {row['workers']}": 100 * row["error"] for row in result["checks"]}
    written = keep(out, f"simulate-check-{loaded.recipe.name}", result, bars, "% off")
    for plot in written[1:]:
        draw_check(result, plot)
    print_table(simulate_check.check_table(result), as_json)
    tell(result, simulate_check.check_notes(result), written, as_json)
    return 0 if all(row["ok"] for row in result["checks"]) else 1


def _counts(text: str, allowed: list[int]) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if word not in map(str, allowed)]:
        raise UserError(f"--workers: {wrong[0]!r} is not checked; allowed: {', '.join(map(str, allowed))}")
    return tuple(count for count in allowed if str(count) in words)
