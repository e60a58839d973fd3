"""Runs as they lie in their folders: finding, listing, reading."""

import contextlib
import json
import math
import shlex
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal.core.errors import UserError
from shoal.core.secrets import scrubbed
from shoal.core.section import nearest
from shoal.core.storage import expand_home, is_checkpoint, read_json_lines

_ENDED = frozenset({"done", "failed", "interrupted"})
_SHORT_S = 60.0
"""A pause that means nothing: an evaluation, a save, a first step."""


@dataclass(frozen=True)
class Run:
    """What a run's folder says."""

    path: Path
    status: str
    """done, failed, interrupted, running, or stopped: no word of an end and, as far as can be told, nobody at work."""
    step: int
    metrics: dict[str, float]
    summary: dict[str, Any]
    recipe: dict[str, Any]
    started: float
    workers: int
    """How many trained together last."""
    restarts: int
    """How often they were started again."""
    written: float
    """When its folder was last written to, in unix seconds."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name


def find_run(name: str, root: Path = Path("runs")) -> Path:
    """The folder of a run given by path or by name under `root`; a unique beginning of the name is enough."""
    if "://" in name:
        raise UserError(f"run {name!r}: is in a store, which only shoal train --resume looks into; give a folder")
    for path in (expand_home(name), root / name):
        if (path / "recipe.yaml").is_file():
            if is_checkpoint(whole := path.resolve()):
                run = f"; its run is {whole.parents[1]}" if whole.parent.name == "checkpoints" else ""
                raise UserError(f"run {name!r}: this is a checkpoint, not a run{run}")
            return path
    names = run_names(root)
    if (match := by_beginning("run", name, names)) is not None:
        return root / match
    if (expand_home(name) / "search.yaml").is_file():
        raise UserError(f"run {name!r}: this is a search; its trials are runs, such as {name.rstrip('/')}/trials/0000")
    if Path(name).is_dir():
        raise UserError(f"run {name!r}: this folder holds no recipe.yaml, so it is not a run")
    guess = nearest(name, names)
    how = "shoal runs list" + ("" if root == Path("runs") else f" --root {root}")
    where = f"no runs in {root.resolve()}" if not names else f"see {how} for the {len(names)} in {root}"
    raise UserError(f"run {name!r}: not found; " + (f"did you mean {guess}?" if guess else where))


def by_beginning(what: str, name: str, names: list[str]) -> str | None:
    """The one of `names` that begins so; none where none does, and a `UserError` where several do."""
    matches = [candidate for candidate in names if candidate.startswith(name)]
    if len(matches) > 1:
        some = ", ".join(sorted(matches)[:5])
        raise UserError(f"{what} {name!r}: {len(matches)} begin so, give more of the name: {some}")
    return matches[0] if matches else None


def resume_command(run_dir: Path, launch: Any = None) -> str:
    """What to type to go on with a run.

    Args:
        run_dir: Its folder.
        launch: What was asked for when it was started, as a `start` event has it: `launcher`, `address`. Where a run
            runs is not part of its recipe, and so must be said again.
    """
    command = f"shoal train --resume {shlex.quote(str(run_dir))}"
    for name in ("launcher", "address"):
        value = launch.get(name) if isinstance(launch, dict) else None
        if isinstance(value, str) and value and (name, value) != ("launcher", "auto"):
            command += f" --{name} {shlex.quote(value)}"
    return command


def run_names(root: Path = Path("runs")) -> list[str]:
    """Names of the runs under `root`."""
    return [path.parent.name for path in root.glob("*/recipe.yaml")] if root.is_dir() else []


def list_runs(root: Path = Path("runs")) -> list[Run]:
    """The runs under `root`, oldest first."""
    return sorted((read_run(root / name) for name in run_names(root)), key=lambda run: run.started)


def read_run(
    path: Path, reports: list[dict[str, Any]] | None = None, events: list[dict[str, Any]] | None = None
) -> Run:
    """What a run's folder says; files that a crash cut short are read as far as they go.

    `reports` and `events`: where they have been read already.
    """
    summary = _read_summary(path / "summary.json")
    events = read_events(path) if events is None else events
    metrics: dict[str, float] = {}
    reported_step = 0
    report_s = 0.0
    for record in read_metrics(path) if reports is None else reports:
        metrics |= record["metrics"]
        reported_step = record["step"]
        report_s = _seconds(record)
    started = events[0]["time"] if events else path.stat().st_mtime
    written = _last_written(path)
    recipe = scrubbed(_read_recipe(path / "recipe.yaml"))
    last_event = next((e["event"] for e in reversed(events) if e["event"] in _ENDED | {"start"}), "start")
    if last_event in _ENDED:
        status, step = summary.get("status", last_event), summary.get("step", reported_step)
        metrics = summary.get("metrics") or metrics
    else:  # the summary is that of an earlier part of the run
        silent_s, pause_s = time.time() - written, _longest_pause_s(events, recipe, report_s)
        began = (path / ".lock").exists()
        status = "running" if began and is_at_work(lock_of(path), events, silent_s, pause_s) else "stopped"
        step = reported_step
    restarts = sum(event["event"] == "restart" for event in events)
    return Run(path, status, step, metrics, summary, recipe, started, _num_workers(events), restarts, written)


def is_at_work(lock: bool | None, events: list[dict[str, Any]], silent_s: float, pause_s: float) -> bool:
    """Whether somebody trains in a folder whose events tell of no end.

    Who trains holds the folder's lock. That it is free says so only of this machine: not every shared file system tells
    one machine of another's locks, and between two starts of the workers nobody holds it. Else it goes by how long
    nothing has been written.
    """
    is_here = _host_of_first(events) in (None, socket.gethostname())
    if lock or (lock is False and is_here and not _is_between(events)):
        return lock
    return silent_s <= pause_s


def lock_of(path: Path) -> bool | None:
    """Whether the folder's lock is held; None where that cannot be told."""
    import fcntl

    try:
        with (path / ".lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def is_locked(path: Path) -> bool:
    """Whether a process is seen to train in this folder now."""
    return lock_of(path) is True


def _longest_pause_s(events: list[dict[str, Any]], recipe: dict[str, Any], report_s: float) -> float:
    """How long a run that is well may write nothing: a few reports, or as long as it waits for machines."""
    failures = recipe.get("failures")
    machines_s = failures.get("machine_timeout_s") if isinstance(failures, dict) and _is_between(events) else 0.0
    return max(_SHORT_S, 3 * report_s, machines_s if isinstance(machines_s, int | float) else 0.0)


def _is_between(events: list[dict[str, Any]]) -> bool:
    """Whether the workers have ended and the launcher is about to start others."""
    return bool(events) and events[-1]["event"] in ("failure", "restart", "resize", "preemption", "hang")


def _host_of_first(events: list[dict[str, Any]]) -> str | None:
    """The machine of rank 0, which holds the lock."""
    workers = next((e.get("workers") for e in reversed(events) if e["event"] == "workers"), None)
    first = workers[0] if isinstance(workers, list) and workers else None
    return first.get("host") if isinstance(first, dict) else None


def _num_workers(events: list[dict[str, Any]]) -> int:
    sizes = (event.get("world_size") for event in reversed(events) if event["event"] == "start")
    return next((size for size in sizes if _is_count(size)), 1)


def _last_written(path: Path) -> float:
    times = [path.stat().st_mtime]
    for name in ("metrics.jsonl", "events.jsonl"):
        with contextlib.suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return max(times)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are reports."""
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The same, one after the other."""
    for record in read_json_lines(path / "metrics.jsonl"):
        if _is_count(record.get("step")) and isinstance(record.get("metrics"), dict):
            yield record


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of events.jsonl that are events."""
    records = read_json_lines(path / "events.jsonl")
    return [record for record in records if isinstance(record.get("event"), str) and _is_time(record.get("time"))]


def read_workers(path: Path) -> list[dict[str, Any]]:
    """The lines of workers.jsonl; runs of earlier versions have none."""
    records = read_json_lines(path / "workers.jsonl")
    return [record for record in records if _is_time(record.get("time")) and isinstance(record.get("seconds"), dict)]


def curves(path: Path, reports: list[dict[str, Any]] | None = None) -> dict[str, list[tuple[int, float]]]:
    """name -> [(step, value)] over the run; `reports`: where they have been read already."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in read_metrics(path) if reports is None else reports:
        for name, value in record["metrics"].items():
            if isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, []).append((record["step"], float(value)))
    return found


def differing_fields(recipes: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """dotted field -> its value in each recipe, for the fields that are not the same in all."""
    flat = [dict(_flatten(recipe)) for recipe in recipes]
    names = sorted({name for fields in flat for name in fields})
    rows = {name: [fields.get(name) for fields in flat] for name in names}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values)}


def _flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in tree.items():
        rows += _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(f"{prefix}{key}", value)]
    return rows


def _read_summary(path: Path) -> dict[str, Any]:
    """The summary, or nothing where it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(value, dict) and _is_count(value.get("step")) and isinstance(value.get("metrics"), dict)
    return value if whole and isinstance(value.get("status"), str) else {}


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _seconds(record: dict[str, Any]) -> float:
    """How long it took since the report before."""
    phases = record.get("seconds")
    return sum(float(s) for s in phases.values() if _is_time(s)) if isinstance(phases, dict) else 0.0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e11


def age(seconds_since_epoch: float) -> str:
    """`3 min ago` and the like."""
    seconds = max(0.0, time.time() - seconds_since_epoch)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"
