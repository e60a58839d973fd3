"""`shoal bench gate`: whether a run is slower than those before it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.completing import complete_run
from shoal.cli.measuring import JSON
from shoal.cli.tables import print_table
from shoal.core.errors import UserError
from shoal.core.storage import to_json_line

if TYPE_CHECKING:
    from shoal.bench.baselines import Baseline, Timing
    from shoal.bench.gate import Judgement


@click.command("gate")
@click.argument("run", shell_complete=complete_run)
@click.option(
    "--baselines",
    "place",
    default="baselines",
    metavar="DIR|FILE.json",
    help="Where they are kept (default: baselines).",
)
@click.option("--save", is_flag=True, help="Add this run to its baseline, or begin one; not if it is a regression.")
@click.option(
    "--threshold",
    default=0.05,
    type=click.FloatRange(min=0, min_open=True),
    help="Changes up to this share are none (default: 0.05).",
)
@click.option(
    "--alpha",
    default=0.05,
    type=click.FloatRange(0, 0.5, min_open=True, max_open=True),
    help="How often chance may pass for a change (default: 0.05).",
)
@JSON
def gate_command(run: str, place: str, save: bool, threshold: float, alpha: float, as_json: bool) -> int:
    """Compare the step times of a finished RUN with those of earlier runs of the same model, recipe and hardware.

    Status 0: as fast, or faster; 1: a regression, and which phase of the step grew; 2: wrong input, or nothing to
    compare with (unless with --save).

    \b
    shoal bench gate runs/mnist-20260101-120000-ab12 --save
    """
    from shoal.bench.baselines import find_baseline, key_of, nearest_kind
    from shoal.bench.gate import judge, read_timing
    from shoal.core.storage import expand_home
    from shoal.observe.runs import find_run, read_events, read_run

    path = find_run(run)
    whole, events = read_run(path), read_events(path)
    timing, key = read_timing(whole, events), key_of(whole, events)
    baseline = find_baseline(expand_home(place), key)
    before = baseline.others(timing)
    found = judge(timing, before, threshold, alpha) if before else None
    if found is None and not save:
        nearest = nearest_kind(baseline.path.parent, key)
        raise UserError(
            f"--baselines: {baseline.path} has no other run to compare with; to begin with this one, add --save"
            + (f" ({nearest})" if nearest else "")
        )
    record = _record(found, timing, threshold) | {"run": timing.run, "baseline": str(baseline.path), "key": key}
    _show(found, record, as_json)
    if save:
        _save(baseline, timing, found, as_json)
    if as_json:
        click.echo(to_json_line(record))
    return 1 if found is not None and found.verdict == "regression" else 0


def _record(found: "Judgement | None", timing: "Timing", threshold: float) -> dict[str, Any]:
    from shoal.bench.gate import to_record

    if found is not None:
        return to_record(found, threshold)
    words = f"no baseline: this is the first run of its kind, with {len(timing.step_s)} stretches of steps"
    return {"verdict": "no baseline", "words": words}


def _show(found: "Judgement | None", record: dict[str, Any], as_json: bool) -> None:
    from shoal.bench.gate import table

    if found is not None:
        print_table(table(found), as_json)
        low, high = found.interval
        click.echo(
            f"ratio {found.ratio:.3f}, with 90% confidence {low:.3f} to {high:.3f}; p = {found.p:.2g}; "
            f"{found.num_runs} run{'s' * (found.num_runs > 1)} in {record['baseline']}",
            err=as_json,
        )
        if found.num_runs < 3:
            click.echo("how much such runs differ by chance is only assumed (1.5%) until three are kept", err=as_json)
    click.echo(record["words"], err=as_json)


def _save(baseline: "Baseline", timing: "Timing", found: "Judgement | None", as_json: bool) -> None:
    """A faster run begins a new level: beside the runs before it, it would pass for a wide spread."""
    from shoal.bench.baselines import write_baseline

    verdict = found.verdict if found is not None else "ok"
    where: Path = baseline.path
    if verdict == "regression":
        click.echo(f"not saved; to take this for the new normal, remove {where} and save again", err=as_json)
        return
    others = [] if verdict == "faster" else baseline.others(timing)
    write_baseline(baseline, [*others, timing])
    instead = f", instead of the {len(baseline.others(timing))} slower ones" if verdict == "faster" else ""
    click.echo(f"saved in {where}{instead}", err=as_json)
