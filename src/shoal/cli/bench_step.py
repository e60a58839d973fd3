"""`shoal bench step`: what a training step costs, beside a loop by hand and beside what one would use instead."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.measuring import JSON, OUT, load, say, tell
from shoal.cli.tables import print_table
from shoal.cli.words import WORDS, recipes_and_overrides
from shoal.core.errors import UserError

if TYPE_CHECKING:
    from shoal.bench.step_peers import Settings

_STEPS, _ROUNDS, _PEER_ROUNDS, _OPENING = 200, 7, 5, 20


@click.command("step")
@WORDS
@click.option(
    "--steps", type=click.IntRange(1), help="Steps a round (default: 200; with --peers, as many as take two seconds)."
)
@click.option("--rounds", type=click.IntRange(1), help="Rounds, each loop once in each (default: 7; with --peers, 5).")
@click.option("--peers", is_flag=True, help="Beside plain PyTorch, Lightning and Accelerate, eager and compiled.")
@click.option(
    "--starts", type=click.IntRange(1), help="With --peers: begin anew in fresh processes so many times (default: 1)."
)
@click.option("--only", metavar="NAME,...", help="With --peers: measure these alone, for example plain,shoal.")
@click.option(
    "--fast", multiple=True, metavar="KEY=VALUE", help="With --peers: Shoal once more, with this; repeatable."
)
@click.option(
    "--launcher", type=click.Choice(["local", "ray"]), help="With --peers: ray measures Shoal in a worker on Ray too."
)
@click.option(
    "--loss-after", type=click.IntRange(1), metavar="N", help="With --peers: tell each one's loss after so many steps."
)
@click.option("--sweep", is_flag=True, help="With --peers: on five small models, one after the other.")
@click.option(
    "--loader",
    type=click.Choice(["batches", "samples"]),
    help="With --peers: their DataLoader reads whole batches (default), or samples, which it puts together.",
)
@click.option(
    "--loader-workers", type=click.IntRange(0), help="With --peers: processes of their DataLoader (default: 0)."
)
@click.option("--made-data", is_flag=True, help="With --peers: on made-up data of the shape of the recipe's own.")
@click.option(
    "--cache", metavar="DIR", help="With --peers: keep what is compiled here, and use it (default: compile anew)."
)
@OUT
@JSON
def step_command(
    words: tuple[str, ...],
    steps: int | None,
    rounds: int | None,
    peers: bool,
    starts: int | None,
    only: str | None,
    fast: tuple[str, ...],
    launcher: str | None,
    loss_after: int | None,
    sweep: bool,
    loader: str | None,
    loader_workers: int | None,
    made_data: bool,
    cache: str | None,
    out: str,
    as_json: bool,
) -> int:
    """The loop's cost per step against a loop written by hand. Without RECIPE: on a trivial model.

    With --peers: Shoal's step beside what one would use instead, each in a process of its own, in turns: PyTorch by
    hand, Lightning and Accelerate (`make peers` installs them), eager and compiled, on the same model, batches
    and settings. A ratio above 1 says that Shoal is faster.

    \b
    shoal bench step mnist --peers
    shoal bench step gpt2 --peers --made-data train.global_batch=32 --fast train.fp8=true --loss-after 500
    shoal bench step --peers --sweep
    """
    own = {"--only": only, "--fast": fast, "--launcher": launcher, "--loss-after": loss_after, "--sweep": sweep}
    own |= {
        "--starts": starts,
        "--loader": loader,
        "--loader-workers": loader_workers,
        "--made-data": made_data,
        "--cache": cache,
    }
    if not peers:
        for option, value in own.items():
            if not (value is None or value is False or value == ()):
                raise UserError(f"{option}: is for --peers; add that, or leave this out")
        return _by_hand(words, steps or _STEPS, rounds or _ROUNDS, out, as_json)
    from shoal.bench.step_contenders import choose_contenders
    from shoal.bench.step_peers import Settings

    settings = Settings(
        names=choose_contenders(only, bool(fast), launcher == "ray"),
        rounds=rounds or _PEER_ROUNDS,
        starts=starts or 1,
        steps=steps,
        opening=loss_after or _OPENING,
        loader=loader or "batches",
        loader_workers=loader_workers or 0,
        made_data=made_data,
        cache=Path(cache) if cache is not None else None,
    )
    _check_fast(fast)
    return (_sweep if sweep else _beside)(words, fast, settings, out, as_json)


def _check_fast(fast: Sequence[str]) -> None:
    from shoal.recipe.merge import is_override

    for word in fast:
        if not is_override(word):
            raise UserError(f"--fast: {word!r} should be KEY=VALUE, for example train.precision=bf16")


def _by_hand(words: tuple[str, ...], steps: int, rounds: int, out: str, as_json: bool) -> int:
    from shoal.bench.results import keep
    from shoal.bench.step import TRIVIAL, measure

    recipe = load(words, TRIVIAL).recipe
    result = measure(recipe, steps, rounds, warmup=min(steps, 20))
    bars = {"shoal": result["shoal_step_ms"], "by hand": result["by_hand_step_ms"]}
    rows = [
        ("shoal", f"{result['shoal_step_ms']:.4f} ms a step"),
        ("by hand", f"{result['by_hand_step_ms']:.4f} ms a step"),
        ("ratio", f"{result['ratio']:.4f}"),
        ("overhead", f"{result['overhead_us']:.1f} us a step"),
    ]
    return tell(result, rows, keep(Path(out), f"step-{recipe.name}", result, bars, "ms a step"), as_json)


def _beside(words: tuple[str, ...], fast: tuple[str, ...], settings: "Settings", out: str, as_json: bool) -> int:
    from shoal.bench.results import keep
    from shoal.bench.step import TRIVIAL
    from shoal.bench.step_peers import measure
    from shoal.bench.step_table import bars, notes, table

    loaded = load(words, TRIVIAL)
    result = measure(loaded, load((*words, *fast), TRIVIAL) if fast else None, settings, say)
    result["fast"] = list(fast)
    written = keep(Path(out), f"step-peers-{loaded.recipe.name}", result, bars(result), "ms a step")
    print_table(table(result), as_json)
    return tell(result, notes(result), written, as_json)


def _sweep(words: tuple[str, ...], fast: tuple[str, ...], settings: "Settings", out: str, as_json: bool) -> int:
    from shoal.bench.results import keep
    from shoal.bench.step_sweep import measure_all, recipes
    from shoal.bench.step_table import sweep_bars, sweep_table

    named, overrides = recipes_and_overrides(words)
    if named:
        raise UserError(f"--sweep: measures models of its own, and takes no recipe; leave out {' '.join(named)}")
    if settings.made_data:
        raise UserError("--made-data: the data of --sweep is made up anyway; leave this out")
    loaded = recipes(overrides)
    with_fast = recipes([*overrides, *fast]) if fast else [None] * len(loaded)
    result: dict[str, Any] = measure_all(loaded, with_fast, settings, say) | {"fast": list(fast)}
    written = keep(Path(out), "step-peers-sweep", result, sweep_bars(result), "times as fast as the best peer")
    print_table(sweep_table(result), as_json)
    one = next(iter(result["models"].values()))
    rows = [("not measured", f"{name}: {why}") for name, why in one["not_measured"].items()]
    rows += [("note", f"{model}: {note}") for model, each in result["models"].items() for note in each["notes"]]
    return tell(result, rows, written, as_json)
