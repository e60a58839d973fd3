"""How a run went, in one object: what `--json` prints and summary.json keeps."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.observe.runs import resume_command
from shoal.observe.verdict import goodput, verdict
from shoal.train.loop import STEPPING, Training


@dataclass(frozen=True)
class Origin:
    """Where a run came from: what the loop itself does not know."""

    run_dir: Path
    started: float
    """When the user asked, in unix seconds."""
    world_size: int
    resumed_from_step: int | None
    samples_before: int
    restarts: int = 0
    first_step_s: float | None = None
    """Seconds to the first step, where it was made before the workers were started again."""


def summarise(run: Training, origin: Origin, status: str, weights_sha256: str | None = None) -> dict[str, Any]:
    """The summary of a run that has ended as `status`: done, interrupted or failed."""
    clock, state = run.clock, run.state
    before_clock_s = max(0.0, time.time() - origin.started - clock.elapsed_s)
    seconds = clock.total_s | {"start": clock.total_s.get("start", 0.0) + before_clock_s}
    stepping_s = sum(clock.total_s.get(phase, 0.0) for phase in STEPPING)
    summary: dict[str, Any] = {
        "run": origin.run_dir.name,
        "run_dir": str(origin.run_dir),
        "status": status,
        "step": state.step,
        "epoch": round(state.step / run.plan.steps_per_epoch, 4),
        "metrics": dict(state.metrics),
        "weights_sha256": weights_sha256,
        "samples_per_s": round((state.samples - origin.samples_before) / max(stepping_s, 1e-9), 2),
        "time_to_first_step_s": _rounded(origin.first_step_s, before_clock_s, run.first_step_s),
        "restarts": origin.restarts,
        "resumed_from_step": origin.resumed_from_step,
        "world_size": origin.world_size,
        "goodput": round(goodput(seconds), 4),
        "verdict": verdict(seconds),
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
    }
    waited_s = clock.total_s.get("data", 0.0)
    summary["data"] = {"wait_share": round(waited_s / max(stepping_s, 1e-9), 4), **run.data.total}
    if status == "interrupted":
        summary["resume"] = resume_command(origin.run_dir)
    if run.items != "samples":
        summary[f"{run.items}_per_s"] = round(run.items_done / max(stepping_s, 1e-9), 2)
    return summary


def _rounded(earlier_s: float | None, before_clock_s: float, first_step_s: float | None) -> float | None:
    if earlier_s is not None:
        return round(earlier_s, 3)
    return None if first_step_s is None else round(before_clock_s + first_step_s, 3)
