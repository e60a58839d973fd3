"""All that a page tells of a search."""

import json
import math
import shlex
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.secrets import scrubbed
from shoal.core.version import VERSION
from shoal.observe.report.thin import rounded, thin
from shoal.tune.domains import Options, as_text
from shoal.tune.schedulers.build import POPULATIONS
from shoal.tune.setup import Setup
from shoal.tune.space import Config, Setting
from shoal.tune.trial import SAME, Objective, Result, Trial

_MOST_POINTS = 40_000
"""Of all curves together."""
_LONGEST = 2_000
"""Characters of a reason or a setting: what is longer is in the journal."""
_FAR = 3.0
"""Values that lie so many times as far out as the middle half is wide would leave no room for the others."""


def page_data(
    trials: Mapping[int, Trial],
    setup: Setup,
    folder: Path,
    summary: Mapping[str, Any],
    has_page: Collection[int] = (),
) -> dict[str, Any]:
    """The data of the page. `has_page`: trials whose runs have a page of their own to go to."""
    settings = _by_importance(setup, summary.get("importance") or {})
    of_trials = [trial.values(setup.objectives) for trial in trials.values()]
    values = {objective: [own[place] for own in of_trials] for place, objective in enumerate(setup.objectives)}
    curves = {trial.number: own_track(trial) for trial in trials.values()}
    most = max(2, _MOST_POINTS // max(len(trials) * len(setup.objectives), 1))
    best = summary.get("best")
    return {
        "name": folder.name,
        "search_dir": str(folder),
        "status": summary.get("status", "running"),
        "error": summary.get("error"),
        "scheduler": setup.section.scheduler,
        "search": setup.section.search,
        "num_trials": setup.num_trials,
        "unit": setup.unit,
        "length": setup.length,
        "counts": summary.get("trials_by_status", {}),
        "figures": {name: summary.get(name) for name in _FIGURES},
        "objectives": [_objective(one, values[one], curves.values()) for one in setup.objectives],
        "settings": [_setting(setting, (summary.get("importance") or {}).get(setting.key)) for setting in settings],
        "too_few": None if summary.get("importance") else _too_few(trials, setup),
        "best": None if best is None else {name: best[name] for name in ("trial", "value", "run_dir")},
        "commands": [] if best is None else _commands(folder, best),
        "front": summary.get("pareto", []),
        "is_population": setup.section.scheduler in POPULATIONS,
        "trials": [
            _trial(trial, setup, settings, curves[trial.number], most)
            | {"page": f"trials/{trial.name}/report.html" if trial.number in has_page else None}
            for trial in trials.values()
        ],
        "made": {"at": round(time.time()), "by": f"Shoal {VERSION}"},
    }


_FIGURES = ("trained", "trained_if_all_to_the_end", "saved", "exploits", "wall_s", "busy_s", "first_step_s")


def _by_importance(setup: Setup, shares: Mapping[str, float]) -> list[Setting]:
    """What matters most first, else as the space has them."""
    return sorted(setup.space, key=lambda setting: -shares.get(setting.key, 0.0))


def _too_few(trials: Mapping[int, Trial], setup: Setup) -> str:
    """Why nothing is said about what matters."""
    rated = sum(trial.value(setup.objective) is not None for trial in trials.values())
    needed = max(6, 2 * len(setup.space.keys))
    if rated >= needed:
        return "No setting explains how the trials differ."
    return f"Too few trials to tell: it takes at least {needed} that have reported a value, and there are {rated}."


def _commands(folder: Path, best: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {"what": "Train with these settings", "text": f"shoal train {shlex.quote(str(folder / 'best.yaml'))}"},
        {"what": f"The run of trial {best['trial']}", "text": best["run_dir"]},
    ]


def _setting(setting: Setting, importance: float | None) -> dict[str, Any]:
    """A field of the space, as an axis."""
    domain, condition = setting.domain, setting.condition
    words = domain.words()
    when = None
    if condition is not None:
        sign = "is not" if condition.is_negated else "is"
        when = f"if {condition.key} {sign} {' or '.join(map(as_text, condition.values))}"
    axis: dict[str, Any]
    if isinstance(domain, Options):
        axis = {"options": [_shown(setting.key, value) for value in domain.values]}
    else:
        axis = {"low": domain.low, "high": domain.high, "log": domain.is_log, "whole": domain.is_whole}
    name = setting.key.rpartition(".")[2]
    return {
        "key": setting.key,
        "words": scrubbed(words[:_LONGEST], name),
        "when": when,
        "importance": importance,
        **axis,
    }


def _shown(key: str, value: Any) -> Any:
    """A setting's value as the page has it: a number, or a text; nothing of what a secret's name tells to hide."""
    shown: Any = value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        shown = text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
    return scrubbed(shown, key.rpartition(".")[2])


def _config(config: Config) -> dict[str, Any]:
    return {key: _shown(key, value) for key, value in config.items()}


def _place(setting: Setting, config: Config) -> float | None:
    """Where a setting lies on its axis, from 0 to 1; None where it is not set, or is none of what the space has."""
    domain = setting.domain
    try:
        value = config[setting.key]
        if isinstance(domain, Options):
            return round(domain.index(value) / (len(domain.values) - 1), 5) if len(domain.values) > 1 else 0.5
        low, high, at = (math.log(x) if domain.is_log else x for x in (domain.low, domain.high, value))
        return round(min(max((at - low) / (high - low), 0.0), 1.0), 5) if math.isfinite(at) else None
    except (KeyError, ValueError, TypeError, ZeroDivisionError):
        return None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return rounded(float(value), 8) if is_number else None


def _trial(
    trial: Trial, setup: Setup, settings: Sequence[Setting], track: Sequence[Result], most: int
) -> dict[str, Any]:
    first = setup.objective
    return {
        "trial": trial.number,
        "status": trial.status,
        "values": [_number(value) for value in trial.values(setup.objectives)],
        "best_at": None if (best := trial.best(first)) is None else best.progress,
        "progress": rounded(trial.progress),
        "config": _config(trial.config),
        "places": [_place(setting, trial.config) for setting in settings],
        "busy_s": round(trial.busy_s, 1),
        "reason": trial.reason[:_LONGEST],
        "curves": [_curve(track, one, most) for one in setup.objectives],
        "lane": _lane(trial) if setup.section.scheduler in POPULATIONS else [],
    }


def own_track(trial: Trial) -> list[Result]:
    """The evaluations of a trial itself, in order: where it took over another's weights, its own until there."""
    stretches = [*trial.past, (trial.config, trial.since, trial.results)]
    ends = [*(since for _, since, _ in stretches[1:]), math.inf]
    found: list[Result] = []
    for (_, since, results), end in zip(stretches, ends, strict=True):
        found += [one for one in results if (since < one.progress or since == 0.0) and one.progress <= end + SAME]
    return found


def _curve(track: Sequence[Result], objective: Objective, most: int) -> dict[str, Any]:
    """The metric over progress; None where it was not a number."""
    named = [one for one in track if objective.metric in one.metrics]
    values = [_number(one.metrics[objective.metric]) for one in named]
    kept = thin(values, most)
    return {"x": [rounded(named[i].progress) for i in kept], "y": [values[i] for i in kept]}


def _lane(trial: Trial) -> list[dict[str, Any]]:
    """Which settings it had, from when to when, and from whom."""
    configs = [*(config for config, _, _ in trial.past), trial.config]
    begins = [0.0, *(float(one["progress"]) for one in trial.lineage)]
    ends = [*begins[1:], max(trial.progress, begins[-1])]
    donors = [None, *(one["from"] for one in trial.lineage)]
    return [
        {"from": begin, "to": end, "donor": donor, "config": _config(config)}
        for config, begin, end, donor in zip(configs, begins, ends, donors, strict=True)
    ]


def _objective(
    objective: Objective, values: Iterable[float | None], tracks: Iterable[Sequence[Result]]
) -> dict[str, Any]:
    """A metric, with the axis of its values and that of its curves."""
    over_time = [one.metrics.get(objective.metric) for track in tracks for one in track]
    return {
        "metric": objective.metric,
        "less_is_better": objective.is_less_better,
        "axis": axis_of(values, objective),
        "curve_axis": axis_of(over_time, objective),
    }


def axis_of(values: Iterable[Any], objective: Objective) -> dict[str, Any] | None:
    """From where to where an axis goes, and how; None where there is no value.

    `cut`: values that are far worse than most are drawn at its end, so that the others can be told apart.
    """
    known = sorted(value for value in map(_number, values) if value is not None)
    if not known:
        return None
    is_log = objective.is_less_better and known[0] > 0 and known[-1] / known[0] > 30
    scaled = [math.log(value) for value in known] if is_log else known
    quarter, three = scaled[len(scaled) // 4], scaled[(3 * len(scaled)) // 4]
    reach = _FAR * (three - quarter)
    if reach > 0 and len(known) >= 8:
        kept = [
            value for value, at in zip(known, scaled, strict=True)
            if (at <= three + reach if objective.is_less_better else at >= quarter - reach)
        ]  # fmt: skip
    else:
        kept = known
    return {"low": kept[0], "high": kept[-1], "log": is_log, "cut": len(kept) < len(known)}
