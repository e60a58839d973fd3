"""`shoal bench overhead`: what observing costs."""

from pathlib import Path

import click

from shoal.cli.measuring import JSON, OUT, load, say, tell
from shoal.cli.words import WORDS


@click.command("overhead")
@WORDS
@click.option("--steps", default=50, type=click.IntRange(1), help="Steps a turn (default: 50).")
@click.option("--rounds", default=40, type=click.IntRange(2), help="Rounds, each side once in each (default: 40).")
@OUT
@JSON
def overhead_command(words: tuple[str, ...], steps: int, rounds: int, out: str, as_json: bool) -> int:
    """What observing costs a step: phases, reports, lines of each worker and, with observe.metrics_port=0, an endpoint
    that is read; against a loop that tells nothing. Without RECIPE: one of the size of mnist, on made-up images."""
    from shoal.bench.overhead import MNIST_SIZED, measure, verdict
    from shoal.bench.results import keep

    loaded = load(words, MNIST_SIZED)
    result = measure(loaded, steps, rounds, say)
    result["verdict"] = verdict(result)
    (low, high), (cpu_low, cpu_high) = result["overhead_interval"], result["cpu_ratio_interval"]
    rows = [
        ("on", f"{result['on_step_ms']:.4f} ms a step, on {result['device']}, {result['data']} data"),
        ("off", f"{result['off_step_ms']:.4f} ms a step"),
        ("a line", f"{result['line_ms']:.3f} ms, every {loaded.recipe.observe.workers_every_s:g} s, of each worker"),
        ("overhead", f"{result['overhead']:.2%} of a step, with 95% confidence {low:.2%} to {high:.2%}"),
        ("CPU time", f"{result['cpu_ratio'] - 1:+.2%}, with 95% confidence {cpu_low - 1:+.2%} to {cpu_high - 1:+.2%}"),
        ("verdict", result["verdict"]),
    ]
    bars = {"on": result["on_step_ms"], "off": result["off_step_ms"]}
    return tell(result, rows, keep(Path(out), f"overhead-{loaded.recipe.name}", result, bars, "ms a step"), as_json)
