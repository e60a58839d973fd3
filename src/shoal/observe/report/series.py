"""What goes along a run: curves of its metrics, and where the time of a step went."""

from collections.abc import Mapping
from typing import Any

from shoal.core.metrics import direction
from shoal.observe.phases import PHASES, STEPPING
from shoal.observe.report.folder import Folder, number, numbers
from shoal.observe.report.thin import rounded, stretches, thin

_MOST_POINTS = 40_000
"""On a page, of all curves together."""
_MOST_OF_A_CURVE, _LEAST_OF_A_CURVE = 1500, 60
_MOST_CURVES = 400
_MOST_STRETCHES = 240
_OF_A_SPLIT = ("train", "val")


def curves_of(folder: Folder, most_points: int = _MOST_POINTS) -> dict[str, dict[str, Any]]:
    """metric -> step, time (seconds since the beginning) and value of its points, thinned out."""
    places: dict[str, list[int]] = {}
    values: dict[str, list[float | None]] = {}
    for place, report in enumerate(folder.reports):
        for name, value in report["metrics"].items():
            if value is None or isinstance(value, int | float):
                places.setdefault(name, []).append(place)
                values.setdefault(name, []).append(number(value))
    names = [name for name in sorted(places) if any(value is not None for value in values[name])][:_MOST_CURVES]
    most = min(max(most_points // max(len(names), 1), _LEAST_OF_A_CURVE), _MOST_OF_A_CURVE)
    return {name: _curve(folder, name, places[name], values[name], most) for name in names}


def _curve(folder: Folder, name: str, places: list[int], values: list[float | None], most: int) -> dict[str, Any]:
    kept = thin(values, most)
    reports = [folder.reports[places[place]] for place in kept]
    known = [value for value in values if value is not None]
    better = direction(name)
    best = None if better is None else min(known) if better == "min" else max(known)
    return {
        "step": [report["step"] for report in reports],
        "time": elapsed(reports, folder.began),
        "value": [rounded(values[place]) for place in kept],
        "last": known[-1],
        "best": best,
        "best_step": None if best is None else folder.reports[places[values.index(best)]]["step"],
        "broken": len(values) - len(known),
        "points": len(values),
    }


def elapsed(records: list[dict[str, Any]], began: float) -> list[float | None] | None:
    """Seconds since the run began of each record; None where not one of them has a time."""
    times = [number(record.get("time")) for record in records]
    if all(time is None for time in times):
        return None
    return [None if time is None else round(time - began, 1) for time in times]


def charts_of(curves: Mapping[str, Mapping[str, Any]], main_metric: str | None = None) -> list[dict[str, Any]]:
    """Curves that belong into one picture, the most telling pictures first."""
    charts: dict[str, list[dict[str, Any]]] = {}
    for name, curve in curves.items():
        split, _, rest = name.partition("_")
        is_split = split in _OF_A_SPLIT and rest != ""
        label = split if is_split else name
        charts.setdefault(rest if is_split else name, []).append({"name": name, "label": label, **curve})
    return [
        {"title": title, "series": sorted(series, key=lambda one: one["name"])}
        for title, series in sorted(charts.items(), key=lambda item: _rank(item[0], item[1], main_metric))
    ]


def _rank(title: str, series: list[dict[str, Any]], main_metric: str | None) -> tuple[int, str]:
    names = {one["name"] for one in series}
    if title == "loss":
        return 0, title
    if main_metric in names:
        return 1, title
    if any(name.startswith(("val_", "train_")) for name in names):
        return 2, title
    return (4 if title == "lr" or title.endswith("_per_s") else 3), title


def phases_over_time(folder: Folder) -> dict[str, Any] | None:
    """Seconds of a step by phase, as means over stretches of the run; None where reports do not tell."""
    rows: list[tuple[dict[str, Any], int, dict[str, float]]] = []
    before = first_step(folder)
    waiting: dict[str, float] = {}
    for report, spent in zip(folder.reports, folder.seconds, strict=True):
        for phase, seconds in spent.items():
            if phase in STEPPING:
                waiting[phase] = waiting.get(phase, 0.0) + seconds
        if report["step"] > before and waiting:
            rows.append((report, report["step"] - before, waiting))
            waiting = {}
        before = max(before, report["step"])
    if not rows:
        return None
    parts = [rows[begin:end] for begin, end in stretches(len(rows), _MOST_STRETCHES)]
    means = [_mean(part) for part in parts]
    last = [part[-1][0] for part in parts]
    return {
        "step": [report["step"] for report in last],
        "time": elapsed(last, folder.began),
        "seconds": {phase: [mean.get(phase, 0.0) for mean in means] for phase in STEPPING if _is_used(phase, means)},
    }


def _is_used(phase: str, means: list[dict[str, float]]) -> bool:
    return any(mean.get(phase, 0.0) > 0 for mean in means)


def _mean(part: list[tuple[dict[str, Any], int, dict[str, float]]]) -> dict[str, float]:
    steps = sum(count for _, count, _ in part)
    found: dict[str, float] = {}
    for _, _, seconds in part:
        for phase, value in seconds.items():
            found[phase] = found.get(phase, 0.0) + value
    return {phase: float(f"{value / steps:.4g}") for phase, value in found.items()}


def first_step(folder: Folder) -> int:
    """The step that the run began at: 0, unless what came before was made elsewhere."""
    steps = [event.get("step") for event in folder.events if event["event"] == "start"]
    return next((step for step in steps if isinstance(step, int)), 0)


def phase_totals(folder: Folder) -> dict[str, float]:
    """phase -> seconds of a worker over the whole run, as far as its reports tell."""
    found: dict[str, float] = {}
    closing = [event for event in folder.events if event["event"] in ("done", "failed", "interrupted")]
    for spent in [*folder.seconds, *(numbers(event.get("seconds")) for event in closing)]:
        for phase, seconds in spent.items():
            found[phase] = found.get(phase, 0.0) + seconds
    known = {phase: round(found[phase], 3) for phase in PHASES if found.get(phase, 0.0) > 0}
    other_s = sum(seconds for phase, seconds in found.items() if phase not in PHASES and seconds > 0)
    return known | ({"other": round(other_s, 3)} if other_s else {})
