"""A panel of the dashboard as a plain value, and how its questions to Prometheus are put.

Metrics may come by two ways at once, the run's endpoint and Ray's agent, and from one worker after another: so every
question first takes the largest of a run's, or of a worker's, values.
"""

from dataclasses import dataclass
from typing import Literal

from shoal.observe.prometheus.rules import step_share

OF_RUN = '{run=~"$run"}'
OF_RANK = '{run=~"$run", rank=~"$rank"}'
BY_RUN, BY_RANK, BY_GPU = "{{run}}", "{{run}} worker {{rank}}", "{{Hostname}} GPU {{gpu}}"
WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """A question, and what its answers are called."""

    expr: str
    legend: str = BY_RUN


@dataclass(frozen=True)
class Shown:
    """A panel."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["lines", "stacked", "number", "states"] = "lines"
    width: int = 8
    """Of 24."""
    thresholds: tuple[tuple[float, str], ...] = ()
    """From which value on which colour; green below."""
    highest: float | None = None
    lowest: float | None = 0.0
    decimals: int | None = None


def by_run(metric: str) -> str:
    """A metric of runs."""
    return f"max by (run) ({metric}{OF_RUN})"


def by_rank(metric: str) -> str:
    """A metric of workers."""
    return f"max by (run, rank) ({metric}{OF_RANK})"


def share(phase: str) -> str:
    """Share of a step that goes to a phase."""
    return step_share(phase, WINDOW, selector=', run=~"$run"')


Thresholds = tuple[tuple[float, str], ...]
HIGH: Thresholds = ((0.8, "yellow"), (0.95, "red"))
ANY: Thresholds = ((1.0, "red"),)


def rank_panel(
    title: str,
    words: str,
    metric: str,
    unit: str,
    *,
    highest: float | None = None,
    lowest: float | None = 0.0,
    thresholds: Thresholds = (),
) -> Shown:
    """A metric of workers, one line each."""
    queries = (Query(by_rank(metric), BY_RANK),)
    return Shown(title, words, queries, unit, highest=highest, lowest=lowest, thresholds=thresholds)


def gpu_panel(
    title: str,
    words: str,
    expr: str,
    unit: str,
    *,
    highest: float | None = None,
    thresholds: Thresholds = (),
    decimals: int | None = None,
) -> Shown:
    """A question to NVIDIA's exporter, one line a GPU."""
    queries = (Query(expr, BY_GPU),)
    return Shown(title, words, queries, unit, highest=highest, thresholds=thresholds, decimals=decimals)
