"""Which run to watch where none is named."""

import contextlib
from pathlib import Path

from shoal.observe.monitor.standing import status_of
from shoal.observe.monitor.watch import RunWatch
from shoal.observe.runs import lock_of, run_names

_MOST_LOOKED_AT = 20


def newest_run(root: Path) -> Path | None:
    """The newest that is running; else the newest; None where there are none."""
    paths = sorted((root / name for name in run_names(root)), key=_written, reverse=True)
    for path in paths[:_MOST_LOOKED_AT]:
        if lock_of(path) is True:
            return path
    for path in paths[:_MOST_LOOKED_AT]:
        watch = RunWatch(path)
        watch.poll(budget_s=0.2)
        if status_of(watch) == "running":
            return path
    return paths[0] if paths else None


def _written(path: Path) -> float:
    times = [0.0]
    for name in ("recipe.yaml", "metrics.jsonl", "events.jsonl"):
        with contextlib.suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return max(times)
