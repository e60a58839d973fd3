"""All that a page tells of one run, as plain values; what they look like is the page's own business."""

import time
from pathlib import Path
from typing import Any

import yaml

from shoal.core.secrets import scrub, scrubbed
from shoal.core.version import VERSION
from shoal.observe.number_words import counted
from shoal.observe.report.facts import checkpoints_of, environment_of, profiles_of
from shoal.observe.report.folder import Folder, number
from shoal.observe.report.outcome import cost_of, goodput_of, ledger_of, rate_of, verdict_of
from shoal.observe.report.series import charts_of, curves_of, phase_totals, phases_over_time
from shoal.observe.report.story import lost_steps, story_of, wall_s, why_it_failed
from shoal.observe.report.workers import workers_of

_LONGEST_RECIPE = 200_000
_RECENT = 20
"""Reports that the time left is judged by."""


def run_data(folder: Folder, target: Path) -> dict[str, Any]:
    """The data of a run's page, which will lie at `target`."""
    main_metric = folder.recipe("checkpoint.metric")
    story = story_of(folder)
    return {
        **head_of(folder),
        "figures": figures_of(folder, wall_s(story["stretches"])),
        "ledger": ledger_of(folder),
        "charts": charts_of(curves_of(folder), main_metric if isinstance(main_metric, str) else None),
        "restarts": _restarts(folder),
        "phases": phases_over_time(folder),
        "totals": phase_totals(folder),
        "workers": workers_of(folder),
        "story": story,
        "checkpoints": checkpoints_of(folder),
        "profiles": profiles_of(folder, target),
        "recipe": _recipe_text(folder.path / "recipe.yaml"),
        "environment": environment_of(folder),
        "made": {"at": round(time.time()), "by": f"Shoal {VERSION}"},
    }


def head_of(folder: Folder) -> dict[str, Any]:
    """What a run is and how it ended."""
    run = folder.run
    return {
        "name": run.name,
        "status": run.status,
        "began": folder.began,
        "failed_because": why_it_failed(folder),
        "verdict": verdict_of(folder),
        "facts": [*_what(folder)],
    }


def _what(folder: Folder) -> list[str]:
    strategy, device = folder.start.get("strategy"), folder.start.get("device")
    count = folder.run.workers
    on = counted(count, "worker")
    told = ", ".join(str(word) for word in (strategy, device) if isinstance(word, str))
    names = [folder.recipe("name"), folder.recipe("model.name"), folder.recipe("data.name")]
    return [*dict.fromkeys(str(name) for name in names if isinstance(name, str)), f"{on} ({told})" if told else on]


def figures_of(folder: Folder, wall: float) -> list[dict[str, Any]]:
    """The figures that one wants to know first. `kind` says how to write the value, `name` of which metric it is."""
    run, summary = folder.run, folder.run.summary
    asked = folder.start.get("num_steps")
    found = [{"label": "Step", "kind": "count", "value": run.step, "note": _of_steps(asked)}]
    for name, value in sorted(run.metrics.items(), key=lambda item: (not item[0].startswith("val_"), item[0])):
        if name.startswith(("val_", "train_")) and len(found) < 6:
            found.append({"label": name, "kind": "metric", "value": number(value)})
    for name, label in (("samples_per_s", "Mean samples/s"), ("tokens_per_s", "Mean tokens/s")):
        if (rate := rate_of(folder, name)) is not None:
            found.append({"label": label, "kind": "rate", "value": rate})
    found += [
        {
            "label": "Goodput",
            "kind": "share",
            "value": goodput_of(folder),
            "note": "of worker time in steps that count",
        },
        {"label": "Wall time", "kind": "duration", "value": wall},
        {"label": "Time left", "kind": "duration", "value": left_s(folder), "note": "at the present pace"},
        {"label": "To first step", "kind": "duration", "value": number(summary.get("time_to_first_step_s"))},
        {"label": "Workers", "kind": "count", "value": run.workers},
        {"label": "Restarts", "kind": "count", "value": run.restarts, "note": _lost_words(lost_steps(folder))},
    ]
    if (price := folder.price_per_hour) is not None:
        note = f"at {price:g} a worker-hour"
        found.append({"label": "Cost", "kind": "money", "value": cost_of(folder), "note": note})
    return [figure for figure in found if figure["value"] is not None]


def _of_steps(asked: Any) -> str | None:
    return f"of {asked:,}" if isinstance(asked, int) and not isinstance(asked, bool) else None


def _lost_words(steps: int) -> str | None:
    return f"{counted(steps, 'step')} made again" if steps else None


def left_s(folder: Folder) -> float | None:
    """Seconds until the last step, of a run that goes on."""
    since = number(folder.start.get("time")) or 0.0  # what came before says nothing of the present pace
    recent = [report for report in folder.reports[-_RECENT:] if (number(report.get("time")) or 0.0) > since]
    asked = folder.start.get("num_steps")
    if folder.run.status != "running" or len(recent) < 2 or not isinstance(asked, int):
        return None
    steps, seconds = recent[-1]["step"] - recent[0]["step"], recent[-1]["time"] - recent[0]["time"]
    return round(max(asked - folder.run.step, 0) * seconds / steps, 1) if steps > 0 and seconds > 0 else None


def _restarts(folder: Folder) -> list[dict[str, Any]]:
    """Where in the curves the workers were started again."""
    starts = [event for event in folder.events if event["event"] == "start" and isinstance(event.get("step"), int)]
    found = [{"step": event["step"], "time": round(event["time"] - folder.began, 1)} for event in starts[1:]]
    return found if len(found) <= 50 else []


def _recipe_text(path: Path) -> str:
    try:
        return _recipe_without_secrets(path.read_text(encoding="utf-8", errors="replace"))[:_LONGEST_RECIPE]
    except OSError:
        return ""


def _recipe_without_secrets(text: str) -> str:
    """As it stands there; written anew where something has the name of a secret."""
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return scrub(text)
    hidden = scrubbed(tree)
    return scrub(text if hidden == tree else yaml.safe_dump(hidden, sort_keys=False))
