"""What the end of a segment means for its trial. A pure function."""

from collections.abc import Mapping
from typing import Any

STOPPED = "stopped"
"""Why a trial ends that the scheduler has stopped, and its status then."""
MOST_BROKEN = 3
"""How often a trial is started again whose launcher broke, which is no fault of its own."""
_KEPT = (
    *(
        "step",
        "epoch",
        "metrics",
        "weights_sha256",
        "samples_per_s",
        "tokens_per_s",
        "time_to_first_step_s",
        "restarts",
    ),
    *("world_size", "goodput", "bottleneck", "run_dir"),
)
"""What the journal keeps of a run's summary."""


def end_event(ending: Mapping[str, Any], stop: str | None, times_broken: int) -> tuple[str, dict[str, Any]]:
    """The event that tells of it: its name, and its fields.

    `stop`: why the scheduler stops the trial, if it does. `times_broken`: how often in a row its launcher broke.
    """
    status, reason = ending["status"], " ".join(ending.get("reason", "").split())
    if status == "done":
        return "ended", {"status": "done", "summary": kept(ending["summary"])}
    if status == "failed":
        trace = {"traceback": ending["traceback"]} if ending.get("traceback") else {}
        return "ended", {"status": "failed", "kind": ending["kind"], "reason": reason, **trace}
    if ending.get("ended_by") == "pause":
        return "paused", {}
    if stop is not None:
        return "ended", {"status": STOPPED, "reason": stop, "summary": kept(ending.get("summary", {}))}
    if ending.get("is_broken") and times_broken >= MOST_BROKEN:
        return "ended", {"status": "failed", "kind": "launcher", "reason": reason}
    return "left", {"reason": reason}


def kept(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What is written down of a run's summary."""
    return {name: summary[name] for name in _KEPT if name in summary}
