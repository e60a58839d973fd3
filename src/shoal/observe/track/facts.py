"""What a run's folder says of the run as a whole: its recipe, its status, its tags. Nothing in it is a secret."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal.core.secrets import scrub, scrubbed
from shoal.core.version import VERSION
from shoal.observe.runs import read_events, read_run

ENDS = ("done", "failed", "interrupted")


@dataclass(frozen=True)
class Facts:
    """What is known now."""

    name: str
    recipe_name: str
    started: float
    """Unix seconds, of its first start."""
    key: str
    """The same for every copy of the run's folder, and for no other run."""
    status: str
    """running, done, failed, interrupted, or stopped: nobody is at work, and there is no word of an end."""
    ended: float | None
    """Unix seconds, where it has ended or stopped."""
    params: dict[str, str]
    """Dotted field of the recipe -> value; a reference where that came from the environment."""
    tags: dict[str, str]
    events: list[dict[str, Any]]


def read_facts(run_dir: Path, is_at_work: bool) -> Facts:
    """From the folder.

    Args:
        run_dir: The run's.
        is_at_work: Whether the run is known to be trained now; else one that has no end is looked at closely.
    """
    events = read_events(run_dir)
    started = events[0]["time"] if events else run_dir.stat().st_mtime
    last = next((event for event in reversed(events) if event["event"] in (*ENDS, "start")), None)
    status, ended = "running", None
    if last is not None and last["event"] in ENDS:
        status, ended = last["event"], last["time"]
    elif not is_at_work and (run := read_run(run_dir)).status != "running":
        status, ended = run.status, run.written
    recipe = _read(run_dir / "recipe.yaml", yaml.safe_load)
    summary = _read(run_dir / "summary.json", json.loads) if ended is not None else {}
    key = hashlib.sha256(f"{run_dir.absolute().name} {started}".encode()).hexdigest()[:32]
    return Facts(
        name=run_dir.absolute().name,
        recipe_name=str(recipe.get("name") or "shoal"),
        started=started,
        key=key,
        status=status,
        ended=ended,
        params={name: scrub(f"{name}={text}").removeprefix(f"{name}=") for name, text in _flat(scrubbed(recipe))},
        tags=_tags(status, events, summary),
        events=events,
    )


def _tags(status: str, events: list[dict[str, Any]], summary: dict[str, Any]) -> dict[str, str]:
    found: dict[str, Any] = {"status": status, "version": VERSION}
    nothing: dict[str, Any] = {}
    start = next((event for event in reversed(events) if event["event"] == "start"), nothing)
    found |= {name: start[name] for name in ("strategy", "world_size", "device", "parameters") if name in start}
    found["restarts"] = sum(event["event"] == "restart" for event in events)
    found |= {name: summary[name] for name in ("verdict", "bottleneck", "goodput", "weights_sha256") if name in summary}
    if error := next((event.get("message") for event in reversed(events) if event["event"] == "failed"), None):
        found |= {"error": error} if status == "failed" else {}
    return {f"shoal.{name}": scrub(str(value)) for name, value in found.items() if value is not None}


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = re.sub(r"[^\w\-./ ]", "_", f"{prefix}{key}")
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{name}.")
        else:
            rows.append((name, value if isinstance(value, str) else json.dumps(value, default=str)))
    return rows


def _read(path: Path, parse: Any) -> dict[str, Any]:
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
