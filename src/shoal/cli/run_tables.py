"""Runs in the terminal: one in full, several side by side. The numbers are those of the pages."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from shoal.core.metrics import less_is_better
from shoal.core.secrets import scrub
from shoal.observe.console import format_metric
from shoal.observe.event_words import event_time, event_words
from shoal.observe.number_words import counted, share, short_time
from shoal.observe.report.compare_data import outcome_rows
from shoal.observe.report.folder import Folder
from shoal.observe.report.outcome import ledger_of, outcome_of, phases_of
from shoal.observe.runs import age, curves, differing_fields

_SPARKS = "▁▂▃▄▅▆▇█"
_MOST_EVENTS = 10
_ONLY_THE_LAST = ("save", "upload")
"""Events that are many, and would hide what happened in between."""


def headline(folder: Folder) -> list[str]:
    """What it is, how it went, and what held it up."""
    run, outcome = folder.run, outcome_of(folder)
    started = time.strftime("%F %T", time.localtime(run.started))
    facts = [counted(run.workers, "worker"), counted(run.restarts, "restart"), f"last written {age(run.written)}"]
    went = [f"{short_time(outcome['wall_s'])} of wall time"]
    if outcome["goodput"] is not None:
        went.append(f"goodput {outcome['goodput']:.1%}")
    went += [
        f"{format_metric(name, outcome[name])} {name.partition('_')[0]}/s on average"
        for name in ("samples_per_s", "tokens_per_s")
        if outcome[name] is not None
    ]
    if outcome["cost"] is not None:
        went.append(f"cost {money(outcome['cost'])}")
    lines = [
        f"{run.path}  {run.status}, step {run.step:,}, started {started}",
        ", ".join(facts),
        ", ".join(went),
    ]
    return lines if outcome["verdict"] is None else [*lines, scrub(outcome["verdict"])]


def ledger_table(folder: Folder) -> Table | None:
    """Where all worker time went, and what that cost where there is a price."""
    ledger = ledger_of(folder)
    if ledger is None:
        return None
    is_priced = ledger["price_per_hour"] is not None
    table = _table("where the time went", "of worker time", "worker time", *(["cost"] if is_priced else []))
    rows = list(ledger["rows"])
    if ledger["unaccounted_s"] >= 0.0005 * ledger["worker_s"]:
        cost = ledger["unaccounted_cost"]
        rows.append({"label": "not accounted for", "seconds": ledger["unaccounted_s"], "cost": cost})
    for row in [*rows, {"label": "all", "seconds": ledger["worker_s"], "cost": ledger["cost"]}]:
        cells = [f"{row['seconds'] / ledger['worker_s']:.1%}", short_time(row["seconds"])]
        table.add_row(row["label"], *cells, *([money(row["cost"])] if is_priced else []))
    return table


def phase_table(folder: Folder) -> Table:
    """What a worker did: the mean over them."""
    table = _table("phase (mean of the workers)", "a step", "in all", "of these")
    for row in phases_of(folder):
        each = "" if row["step_s"] is None else short_time(row["step_s"])
        table.add_row(row["phase"], each, short_time(row["seconds"]), share(row["share"]))
    return table


def metric_table(folder: Folder) -> Table:
    """First, last and best, and the course."""
    table = Table(box=None, pad_edge=False)
    for column in ("metric", "first", "last", "best", "curve"):
        table.add_column(column)
    for metric, points in sorted(curves(folder.path, folder.reports).items()):
        values = [value for _, value in points]
        shown = (values[0], values[-1], _best(metric, values))
        table.add_row(metric, *(format_metric(metric, value) for value in shown), sparkline(values))
    return table


def event_lines(events: Sequence[dict[str, Any]]) -> list[str]:
    """The last events, in words."""
    last = {event["event"]: number for number, event in enumerate(events)}
    kept = [
        event
        for number, event in enumerate(events)
        if event["event"] != "workers" and (event["event"] not in _ONLY_THE_LAST or number == last[event["event"]])
    ]
    now = time.time()
    return [f"{event_time(event, now)}  {scrub(event_words(event))}" for event in kept[-_MOST_EVENTS:]]


def comparison_table(folders: Sequence[Folder]) -> Table:
    """A column a run: how it went, what differs in the recipes, metrics with their curves."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for folder in folders:
        table.add_column(folder.run.name, overflow="fold")
    for row in outcome_rows(folders):
        write = _WRITTEN[row["kind"]]
        table.add_row(row["label"], *("-" if value is None else write(value) for value in row["values"]))
    for field, values in differing_fields([folder.run.recipe for folder in folders]).items():
        if field != "name":
            table.add_row(field, *(json.dumps(value) for value in values))
    all_curves = [curves(folder.path, folder.reports) for folder in folders]
    metrics = {metric for found in all_curves for metric in found}
    for metric in sorted(name for name in metrics if not name.endswith("_per_s")):  # whose means are above
        cells = []
        for found in all_curves:
            values = [value for _, value in found.get(metric, [])]
            cells.append(f"{format_metric(metric, values[-1])} {sparkline(values)}" if values else "-")
        table.add_row(metric, *cells)
    return table


def sparkline(values: list[float], width: int = 24) -> str:
    """The course of a metric in one line of block characters."""
    if len(values) > width:
        values = [values[int(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[int((value - low) * scale)] for value in values)


def money(value: float) -> str:
    """In whatever currency: `12.40`, and of less than one more digits."""
    return f"{value:,.2f}" if abs(value) >= 0.995 or value == 0 else f"{value:.4f}"


_WRITTEN: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": lambda value: f"{value:,}",
    "duration": short_time,
    "rate": lambda value: format_metric("samples_per_s", value),
    "share": lambda value: f"{value:.1%}",
    "money": money,
}


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _best(metric: str, values: list[float]) -> float | None:
    """The best value, for what can be good or bad: not for learning rates and speeds."""
    if not metric.startswith("val_") and metric != "train_loss":
        return None
    return min(values) if less_is_better(metric) else max(values)
