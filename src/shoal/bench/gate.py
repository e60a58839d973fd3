"""Whether a run's steps take longer than those of the runs before it: `shoal bench gate`. Judged by a statistical test
that knows of outliers, of steps that resemble their neighbours, and of how much whole runs differ."""

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.bench.baselines import Timing
from shoal.core.errors import UserError
from shoal.observe.number_words import counted
from shoal.observe.phases import COMPUTING, STEPPING
from shoal.observe.runs import Run, read_metrics

WARMUP_STEPS = 20
"""Of every start, so many first steps do not count: kernels are chosen, caches fill, code is compiled."""
FEWEST_REPORTS = 8
"""Reports that must be left: fewer say nothing of how much they vary."""
_ASSUMED_SPREAD = 0.015
"""How much whole runs of the same are taken to differ (standard deviation, as a share), as long as few are known."""
_ASSUMED_RUNS = 3
"""As if this had been seen in so many runs: it weighs less and less beside those that are really there."""
_FAR = 2.5
"""A run of the baseline that is further off the others than so many standard deviations counts as just so far."""
_RESAMPLES = 500
_MOST_STRETCHES = 1000
"""Of a long run, so many stretches between two reports are taken, from all of it."""
AGREEING = 3
"""So many faster runs, one after the other, are no luck: they begin a new level."""


@dataclass(frozen=True)
class Change:
    """A phase, then and now, in seconds a step."""

    phase: str
    before_s: float
    now_s: float

    @property
    def grew_s(self) -> float:
        """By how much it takes longer."""
        return self.now_s - self.before_s


@dataclass(frozen=True)
class Judgement:
    """How a run compares with its baseline."""

    verdict: str
    """ok, faster or regression."""
    before_s: float
    """Seconds a step: the median over the steps of a run, and of those the (geometric) mean over the runs, odd ones
    moved towards the others."""
    now_s: float
    ratio: float
    interval: tuple[float, float]
    """Where the true ratio lies, with 90% confidence."""
    p: float
    """How likely such a ratio, or one further from 1, would be if nothing had changed."""
    num_runs: int
    """In the baseline."""
    changes: list[Change]
    """By phase, in the order of a step."""

    @property
    def grown(self) -> Change | None:
        """The phase that grew most, where the step did."""
        worst = max(self.changes, key=lambda change: change.grew_s, default=None)
        return worst if worst is not None and worst.grew_s > 0 and self.ratio > 1 else None


def read_timing(run: Run, events: Sequence[Mapping[str, Any]]) -> Timing:
    """The step times of a finished run, without those of its first steps."""
    if run.status != "done":
        raise UserError(f"run {run.name!r}: is {run.status}; only a run that is done can be judged")
    starts = [event for event in events if event["event"] == "start"]
    first_steps = [int(start["step"]) for start in starts if isinstance(start.get("step"), int)]
    windows = step_windows(read_metrics(run.path), first_steps)
    if len(windows) < FEWEST_REPORTS:
        raise UserError(
            f"run {run.name!r}: has {counted(len(windows), 'report')} after the first {WARMUP_STEPS} steps, and at "
            f"least {FEWEST_REPORTS} are needed; train longer, or report more often (observe.every_steps)"
        )
    windows = windows[:: -(-len(windows) // _MOST_STRETCHES)]
    names = [phase for phase in STEPPING if any(window.get(phase) for window in windows)]
    phases = {name: statistics.median(window.get(name, 0.0) for window in windows) for name in names}
    told = starts[-1].get("versions") if starts else None
    versions = {name: str(version) for name, version in told.items()} if isinstance(told, dict) else {}
    return Timing(run.name, run.started, [sum(window.values()) for window in windows], phases, versions)


def step_windows(reports: Sequence[Mapping[str, Any]], first_steps: Sequence[int]) -> list[dict[str, float]]:
    """Seconds a step by phase, of every stretch between two reports that holds no first steps of a start.

    An evaluation reports too, at a step that may have been reported already: then there are no steps between.
    """
    starts = [0, *first_steps]
    windows, before = [], 0
    for report in reports:
        step = int(report["step"])
        begin = max([before, *(start for start in starts if start < step)])
        before = step
        is_warm = all(begin >= start + WARMUP_STEPS or step <= start for start in starts)
        seconds = report.get("seconds")
        if step <= begin or not is_warm or not isinstance(seconds, dict):
            continue
        told = {phase: seconds[phase] for phase in STEPPING if phase in seconds}
        if all(map(_is_time, told.values())) and sum(told.values()) > 0:  # without one, a step would look shorter
            windows.append({phase: float(value) / (step - begin) for phase, value in told.items()})
    return windows


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def judge(now: Timing, before: Sequence[Timing], threshold: float = 0.05, alpha: float = 0.05) -> Judgement:
    """Compare a run with those of its baseline.

    What is compared is the logarithm of each run's median, with the mean of those of the baseline; a run among them
    that is far from the others, by luck or not, counts as less far. It is off by what the run's own steps leave open,
    which a bootstrap over blocks of neighbouring steps tells, and by what whole runs differ, which the runs of the
    baseline tell, and an assumption as long as they are few. A regression is both: beyond chance (one-sided t-test,
    p < alpha), and larger than `threshold`.
    """
    from scipy.stats import t

    freedom = _ASSUMED_RUNS + len(before) - 1
    open_now = _error(tuple(now.step_s)) ** 2
    open_before = statistics.fmean(_error(tuple(run.step_s)) ** 2 for run in before)
    assumed = _ASSUMED_SPREAD**2 + max(open_now, open_before)
    levels = _without_far_ones([_level(run.step_s) for run in before], math.sqrt(assumed))
    level = statistics.fmean(levels)
    spread = (_ASSUMED_RUNS * assumed + math.fsum((one - level) ** 2 for one in levels)) / freedom
    error = math.sqrt(max(spread, open_now) + max(spread, open_before) / len(levels))
    difference = _level(now.step_s) - level
    p = float(t.sf(abs(difference) / error, freedom))
    reach = float(t.isf(0.05, freedom)) * error
    ratio = math.exp(difference)
    verdict = "ok"
    if p < alpha and ratio > 1 + threshold:
        verdict = "regression"
    elif p < alpha and ratio < 1 / (1 + threshold):
        verdict = "faster"
    return Judgement(
        verdict=verdict,
        before_s=math.exp(level),
        now_s=math.exp(_level(now.step_s)),
        ratio=ratio,
        interval=(math.exp(difference - reach), math.exp(difference + reach)),
        p=p,
        num_runs=len(levels),
        changes=_changes(now.phases_s, [run.phases_s for run in before]),
    )


def _without_far_ones(levels: Sequence[float], assumed: float) -> list[float]:
    """Those that are far from the middle moved to where "far" begins, so that no single one decides."""
    middle = statistics.median(levels)
    usual = 1.4826 * statistics.median(abs(one - middle) for one in levels)  # a standard deviation, without outliers
    reach = _FAR * max(usual, assumed)
    return [min(max(one, middle - reach), middle + reach) for one in levels]


def runs_with(now: Timing, before: Sequence[Timing], threshold: float = 0.05, alpha: float = 0.05) -> list[Timing]:
    """The runs of a baseline once `now` is one of them, oldest first.

    A single fast run may be luck, and stays one among the others. When the newest three are each faster than those
    before them, that is the new level: the older ones are dropped, so that falling back to them is a regression.
    """
    runs = sorted([*before, now], key=lambda run: run.time)
    older, newest = runs[:-AGREEING], runs[-AGREEING:]
    is_new_level = older and all(judge(run, older, threshold, alpha).verdict == "faster" for run in newest)
    return newest if is_new_level else runs


def _level(step_s: Sequence[float]) -> float:
    return math.log(statistics.median(step_s))


@functools.lru_cache
def _error(step_s: tuple[float, ...]) -> float:
    """Standard error of the logarithm of the median: of samples put together from blocks, so that steps which are slow
    because those before them were do not count as if each were news."""
    values, count = np.log(np.asarray(step_s)), len(step_s)
    return max(_error_by_blocks(values, size) for size in (math.isqrt(count), -(-count // 4)))


def _error_by_blocks(values: "np.ndarray[Any, np.dtype[np.float64]]", size: int) -> float:
    count = len(values)
    drawn = np.random.default_rng(0).integers(0, count, (_RESAMPLES, -(-count // size), 1))
    samples = values[(drawn + np.arange(size)) % count].reshape(_RESAMPLES, -1)[:, :count]
    return float(np.std(np.median(samples, axis=1)))


def _changes(now: Mapping[str, float], before: Sequence[Mapping[str, float]]) -> list[Change]:
    """Phase by phase; where some runs tell the parts of computing and others do not, computing as one."""
    if any(("forward_backward" in run) != ("forward_backward" in now) for run in before):
        now, before = _as_one(now), [_as_one(run) for run in before]
    names = [name for name in ("compute", *STEPPING) if name in now or any(name in run for run in before)]
    return [Change(name, statistics.median(run.get(name, 0.0) for run in before), now.get(name, 0.0)) for name in names]


def _as_one(phases: Mapping[str, float]) -> dict[str, float]:
    others = {name: seconds for name, seconds in phases.items() if name not in COMPUTING}
    return others | {"compute": math.fsum(phases.get(name, 0.0) for name in COMPUTING)}


def in_words(found: Judgement, threshold: float) -> str:
    """The judgement in a line."""
    then, now = f"{1e3 * found.before_s:.4g}", f"{1e3 * found.now_s:.4g}"
    size, limit = f"{found.ratio - 1:+.1%}, {then} -> {now} ms", f"{100 * threshold:.3g}%"
    if found.verdict == "regression":
        grown = found.grown
        why = f"; {phase_words(grown)}" if grown is not None else ""
        return f"regression: a step takes longer by more than {limit} and beyond chance ({size}){why}"
    if found.verdict == "faster":
        return f"faster: a step takes less time, by more than {limit} and beyond chance ({size})"
    if abs(found.ratio - 1) > threshold:
        return f"ok: the difference may be chance ({size}; p = {found.p:.2g}); longer runs, or more of them, tell more"
    return f"ok: a step takes as long as before, within {limit} ({size})"


def phase_words(change: Change) -> str:
    """`data grew most, by 19.8 ms (0.5 -> 20.3)`."""
    return (
        f"{change.phase} grew most, by {1e3 * change.grew_s:.3g} ms a step "
        f"({1e3 * change.before_s:.3g} -> {1e3 * change.now_s:.3g})"
    )


def table(found: Judgement) -> list[list[str]]:
    """Step and phases, then and now, in rows of text; the first is a heading."""
    rows = [["ms a step", "baseline", "now", "change", ""]]
    whole = Change("step (median)", found.before_s, found.now_s)
    for change in [whole, *found.changes]:
        share = f"{change.grew_s / change.before_s:+.1%}" if change.before_s > 0 else ""
        numbers = [f"{1e3 * change.before_s:.3f}", f"{1e3 * change.now_s:.3f}", f"{1e3 * change.grew_s:+.3f}"]
        rows.append([change.phase, *numbers, share])
    return rows


def to_record(found: Judgement, threshold: float) -> dict[str, Any]:
    """For `--json`."""
    grown = found.grown if found.verdict == "regression" else None
    return {
        "verdict": found.verdict,
        "words": in_words(found, threshold),
        "step_s": found.now_s,
        "baseline_step_s": found.before_s,
        "ratio": found.ratio,
        "ratio_interval": list(found.interval),
        "p": found.p,
        "threshold": threshold,
        "baseline_runs": found.num_runs,
        "phases": {
            change.phase: {"step_s": change.now_s, "baseline_step_s": change.before_s} for change in found.changes
        },
        "grew": grown.phase if grown is not None else None,
    }
