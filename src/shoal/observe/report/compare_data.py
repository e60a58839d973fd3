"""All that a page tells of several runs side by side."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.core.metrics import direction
from shoal.core.secrets import scrub
from shoal.core.version import VERSION
from shoal.observe.ledger import CATEGORIES, LABELS
from shoal.observe.report.folder import Folder, number
from shoal.observe.report.outcome import ledger_of, outcome_of
from shoal.observe.report.run_data import head_of
from shoal.observe.report.series import charts_of, curves_of
from shoal.observe.runs import differing_fields

_MOST_POINTS = 60_000
"""Of all runs together."""


def compare_data(folders: Sequence[Folder]) -> dict[str, Any]:
    """The data of the page."""
    curves = [curves_of(folder, _MOST_POINTS // len(folders)) for folder in folders]
    main = {metric for folder in folders if isinstance(metric := folder.recipe("checkpoint.metric"), str)}
    return {
        "runs": [head_of(folder) | {"label": label} for folder, label in zip(folders, _labels(folders), strict=True)],
        "outcome": outcome_rows(folders),
        "metrics": _final_metrics(folders),
        "ledgers": [ledger_of(folder) for folder in folders],
        "shares": _shares(folders),
        "recipe": _recipe_rows(folders),
        "charts": _charts(curves, next(iter(sorted(main)), None)),
        "made": {"at": round(time.time()), "by": f"Shoal {VERSION}"},
    }


def _labels(folders: Sequence[Folder]) -> list[str]:
    """Names that tell the runs apart: their folders', or their paths where those are the same."""
    names = [folder.run.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in folders]


ROWS = (
    ("status", "text", "status", None),
    ("step", "count", "step", None),
    ("workers", "count", "workers", None),
    ("restarts", "count", "restarts", "min"),
    ("wall time", "duration", "wall_s", "min"),
    ("to first step", "duration", "time_to_first_step_s", "min"),
    ("mean samples/s", "rate", "samples_per_s", "max"),
    ("mean tokens/s", "rate", "tokens_per_s", "max"),
    ("goodput", "share", "goodput", "max"),
    ("cost", "money", "cost", "min"),
    ("bottleneck", "text", "bottleneck", None),
)
"""label, kind of value, name in an outcome or a run, and whether less or more is better."""


def outcome_rows(folders: Sequence[Folder]) -> list[dict[str, Any]]:
    """How it went: a row a fact, a value a run. `best`: where the best values are, if one can be better."""
    known = [vars(folder.run) | outcome_of(folder) for folder in folders]
    rows = [_row(label, kind, [facts[name] for facts in known], better) for label, kind, name, better in ROWS]
    return [row for row in rows if any(value is not None for value in row["values"])]


def _row(label: str, kind: str, values: Sequence[Any], better: str | None = None) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    best: list[int] = []
    if better is not None and len(set(known)) > 1:
        top = (min if better == "min" else max)(known)
        best = [place for place, value in enumerate(values) if value == top]
    return {"label": label, "kind": kind, "values": list(values), "best": best}


def _final_metrics(folders: Sequence[Folder]) -> list[dict[str, Any]]:
    found = {name for folder in folders for name in folder.run.metrics}
    names = sorted(name for name in found if name != "lr" and not name.endswith("_per_s"))
    values = {name: [number(folder.run.metrics.get(name)) for folder in folders] for name in names}
    return [
        _row(name, "metric", row, direction(name)) for name, row in values.items() if any(v is not None for v in row)
    ]


def _shares(folders: Sequence[Folder]) -> list[dict[str, Any]]:
    """Of each run's worker time, by what it went to."""
    ledgers = [folder.ledger for folder in folders]

    def row(label: str, seconds: Callable[[Any], float], better: str | None) -> dict[str, Any]:
        shares = [round(seconds(one) / one.worker_s, 5) if one.worker_s > 0 else None for one in ledgers]
        return _row(label, "share", shares, better)

    rows = [row(LABELS[name], lambda one, name=name: one.seconds[name], None) for name in CATEGORIES]  # type: ignore[misc]
    rows.append(row("not accounted for", lambda one: max(one.unaccounted_s, 0.0), None))
    total = _row("worker time", "duration", [round(one.worker_s, 1) or None for one in ledgers])
    return [row for row in [*rows, total] if any(row["values"])]


def _recipe_rows(folders: Sequence[Folder]) -> list[dict[str, Any]]:
    rows = differing_fields([folder.run.recipe for folder in folders])
    return [
        {"label": field, "kind": "code", "values": [_shown(field, value) for value in values], "best": []}
        for field, values in rows.items()
    ]


def _shown(field: str, value: Any) -> str | None:
    """A recipe's value; a secret by its field's name is none to show, whatever it looks like itself."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    named = f"{field.rpartition('.')[2]}={text}"
    return text if scrub(named) == named else "***"


def _charts(curves: Sequence[dict[str, dict[str, Any]]], main_metric: str | None) -> list[dict[str, Any]]:
    """A picture a metric, with a curve a run."""
    names = {name: next(found[name] for found in curves if name in found) for found in curves for name in found}
    order = [one["name"] for chart in charts_of(names, main_metric) for one in chart["series"]]
    return [
        {
            "title": name,
            "series": [
                {"name": name, "run": place, **found[name]} for place, found in enumerate(curves) if name in found
            ],
        }
        for name in order
    ]
