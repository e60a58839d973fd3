"""A run's folder read once, for a page: what is missing, cut short or of the wrong kind is left out."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.observe.ledger import Ledger, make_ledger
from shoal.observe.runs import Run, read_events, read_metrics, read_run, read_workers

_LARGEST_BYTES = 20_000_000
"""Of a JSON file that is read whole: a profile's table, not its trace."""


@dataclass(frozen=True)
class Folder:
    """What pages are made from."""

    path: Path
    run: Run
    reports: list[dict[str, Any]]
    events: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    """Lines of workers.jsonl."""

    @cached_property
    def ledger(self) -> Ledger:
        """Where the worker-seconds went."""
        return make_ledger(self.events, self.reports)

    @cached_property
    def has_times(self) -> bool:
        """Whether reports say when they were made; those of early runs do not."""
        return any(number(report.get("time")) is not None for report in self.reports)

    @cached_property
    def seconds(self) -> list[dict[str, float]]:
        """phase -> seconds, of each report."""
        return [numbers(report.get("seconds")) for report in self.reports]

    @cached_property
    def began(self) -> float:
        """When the run was asked for, in unix seconds."""
        asked = [number(event.get("asked")) for event in self.events if event["event"] == "start"]
        return min([self.run.started, *(time for time in asked[:1] if time is not None)])

    @cached_property
    def start(self) -> dict[str, Any]:
        """The latest start."""
        return next((event for event in reversed(self.events) if event["event"] == "start"), {})

    def recipe(self, dotted: str) -> Any:
        """A field of the recipe; None where there is none."""
        value: Any = self.run.recipe
        for name in dotted.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    @property
    def price_per_hour(self) -> float | None:
        """Of one worker."""
        price = number(self.recipe("cluster.price_per_hour"))
        return price if price is not None and price > 0 else None


def read_folder(path: Path) -> Folder:
    """All of it."""
    reports, events = read_metrics(path), read_events(path)
    return Folder(path, read_run(path, reports, events), reports, events, read_workers(path))


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if type(value) is float:  # nearly always
        return value if math.isfinite(value) else None
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_one else None


def numbers(mapping: Any) -> dict[str, float]:
    """Of a mapping, what is a finite number; of anything else nothing."""
    if not isinstance(mapping, Mapping):
        return {}
    return {str(name): found for name, value in mapping.items() if (found := number(value)) is not None}


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; nothing where it does not, or where it is far too large to be one of ours."""
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            return {}
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
