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
@click.option("--accept", is_flag=True, help="Take this run for the new normal, in place of those before it.")
@click.option("--threshold", default=0.05, help="Changes up to this share are none (default: 0.05, which is 5%).")
@click.option("--alpha", default=0.05, help="How often chance may pass for a change (default: 0.05).")
@JSON
def gate_command(run: str, place: str, save: bool, accept: bool, threshold: float, alpha: float, as_json: bool) -> int:
    """Compare the step times of a finished RUN with those of earlier runs of the same model, recipe and hardware.

    Status 0: as fast, or faster, or accepted; 1: a regression, and which phase of the step grew; 2: wrong input, or
    nothing to compare with (unless with --save or --accept).

    \b
    shoal bench gate runs/mnist-20260101-120000-ab12 --save
    """
    from shoal.bench.baselines import check_place, find_baseline, key_of
    from shoal.bench.gate import judge, read_timing
    from shoal.observe.runs import find_run, read_events, read_run

    _check_shares(threshold, alpha)
    if Path(run).is_file():
        raise UserError(f"run {run!r}: is a file; give the folder of a run that shoal train has made, or its name")
    path = find_run(run)
    whole, events = read_run(path), read_events(path)
    timing, key = read_timing(whole, events), key_of(whole, events)
    baseline = find_baseline(check_place(place, may_begin=save or accept), key)
    before = baseline.others(timing)
    if not before and not save and not accept:
        raise UserError(_nothing_there(baseline))
    found = judge(timing, before, threshold, alpha) if before else None
    is_refused = found is not None and found.verdict == "regression" and not accept
    record = _record(found, threshold, baseline) | {"run": timing.run, "baseline": str(baseline.path), "key": key}
    _show(found, record, as_json)
    if is_refused:
        click.echo(_refused(len(before), save), err=as_json)
    elif save or accept:
        is_faster = found is not None and found.verdict == "faster"
        click.echo(_save(baseline, timing, is_faster, None if accept else (threshold, alpha)), err=as_json)
    if as_json:
        click.echo(to_json_line(record | {"saved": (save or accept) and not is_refused, "accepted": accept}))
    return 1 if is_refused else 0


def _check_shares(threshold: float, alpha: float) -> None:
    if not 0 < threshold <= 1:
        raise UserError(f"--threshold: {threshold:g} should be a share above 0 and at most 1; 0.05 is 5%")
    if not 0 < alpha < 0.5:
        raise UserError(f"--alpha: {alpha:g} should be above 0 and below 0.5; 0.05 is 1 time in 20")


def _nothing_there(baseline: "Baseline") -> str:
    from shoal.bench.baselines import nearest_kind

    if baseline.runs:
        return f"--baselines: {baseline.path} holds this very run alone; train once more, and compare that run"
    near = nearest_kind(baseline.path.parent, baseline.key)
    return (
        f"--baselines: {baseline.path.parent} holds no run of this kind; to begin a baseline with this one, add --save"
        + (f" ({near})" if near else "")
    )


def _record(found: "Judgement | None", threshold: float, baseline: "Baseline") -> dict[str, Any]:
    from shoal.bench.gate import to_record

    if found is not None:
        return to_record(found, threshold)
    if baseline.runs:
        return {
            "verdict": "no baseline",
            "words": "the baseline holds this very run alone: nothing to compare with",
        }
    return {"verdict": "no baseline", "words": "no baseline yet: this is the first run of its kind"}


def _show(found: "Judgement | None", record: dict[str, Any], as_json: bool) -> None:
    from shoal.bench.gate import table
    from shoal.observe.number_words import counted

    if found is not None:
        print_table(table(found), as_json)
        low, high = found.interval
        click.echo(
            f"ratio {found.ratio:.3f}, with 90% confidence {low:.3f} to {high:.3f}; p = {found.p:.2g}; "
            f"{counted(found.num_runs, 'run')} in {record['baseline']}",
            err=as_json,
        )
        if found.num_runs < 3:
            click.echo("how much such runs differ by chance is only assumed (1.5%) until three are kept", err=as_json)
    click.echo(record["words"], err=as_json)


def _refused(num_before: int, save: bool) -> str:
    """What to do about a regression; of a baseline of one or two runs, nobody can say which is the odd one."""
    luck = ""
    if num_before < 3:
        those = "the one run" if num_before == 1 else "the two runs"
        luck = f"{those} in the baseline may have had luck: train once more, and compare that; "
    return f"{'not saved; ' * save}{luck}to take this run for the new normal, add --accept"


def _save(baseline: "Baseline", timing: "Timing", is_faster: bool, limits: tuple[float, float] | None) -> str:
    """Keep the run beside those that are there by now: another gate may have written. What was done, in words.

    `limits`: threshold and alpha; None: the run takes the place of all others.
    """
    from shoal.bench.baselines import changing, find_baseline, write_baseline
    from shoal.bench.gate import AGREEING, runs_with
    from shoal.observe.number_words import counted

    path, is_new_folder = baseline.path, not baseline.path.parent.exists()
    with changing(path):
        others = find_baseline(path, baseline.key).others(timing)
        runs = [timing] if limits is None else runs_with(timing, others, *limits)
        write_baseline(path, baseline.key, runs)
    words = f"saved in {path}" + (" (its folder is new)" if is_new_folder else "")
    dropped = len(others) + 1 - len(runs)
    if dropped and limits is None:
        return f"{words}, in place of the {counted(dropped, 'run')} before it"
    if dropped:
        those = "the slower run before them is" if dropped == 1 else f"the {dropped} slower runs before them are"
        return f"{words}; {AGREEING} runs in a row are faster now, so {those} dropped"
    if is_faster:
        words += f"; the level is the new one once {AGREEING} runs in a row are as fast, or at once with --accept"
    return words
