"""How a run went, in one object: what `--json` prints and summary.json keeps."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.observe.ledger import make_ledger
from shoal.observe.phases import STEPPING
from shoal.observe.runs import iterate_metrics, read_events, resume_command
from shoal.observe.verdict import Verdict
from shoal.train.training import Training


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
    launch: dict[str, str] = field(default_factory=dict)
    """Launcher and address that were asked for."""


def summarise(run: Training, origin: Origin, end: dict[str, Any], weights_sha256: str | None = None) -> dict[str, Any]:
    """The summary of a run that has ended, given the event that says so: done, interrupted or failed."""
    status = end["event"]
    clock, state = run.clock, run.state
    clock.finish()
    before_clock_s = max(0.0, clock.started_at - origin.started)
    seconds = clock.total_s | {"start": clock.total_s.get("start", 0.0) + before_clock_s}
    stepping_s = sum(clock.total_s.get(phase, 0.0) for phase in STEPPING)
    summary: dict[str, Any] = {
        "run": origin.run_dir.name,
        "run_dir": str(origin.run_dir),
        "status": status,
        "step": state.step,
        "epoch": round(state.step / run.plan.steps_per_epoch, 6),
        "metrics": dict(state.metrics),
        "weights_sha256": weights_sha256,
        "samples_per_s": round((state.samples - origin.samples_before) / max(stepping_s, 1e-9), 2),
        "time_to_first_step_s": _rounded(origin.first_step_s, before_clock_s, run.first_step_s),
        "restarts": origin.restarts,
        "resumed_from_step": origin.resumed_from_step,
        "world_size": origin.world_size,
        **_judged(run, origin, end, seconds),
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
    }
    waited_s = clock.total_s.get("data", 0.0)
    summary["data"] = {"wait_share": round(waited_s / max(stepping_s, 1e-9), 4), **run.data.total}
    if status == "interrupted":
        summary["resume"] = resume_command(origin.run_dir, origin.launch)
    if run.items != "samples":
        summary[f"{run.items}_per_s"] = round(run.items_done / max(stepping_s, 1e-9), 2)
    return summary


def _judged(run: Training, origin: Origin, end: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """Goodput, verdict and ledger; the last of all starts of the run, as its folder tells."""
    ledger = make_ledger([*read_events(origin.run_dir), end], iterate_metrics(origin.run_dir))
    return {
        "goodput": round(ledger.goodput, 4),
        **_verdict(run.vitals.verdict(), seconds).to_record(),
        "ledger": ledger.to_record(run.recipe.cluster.price_per_hour),
    }


def _verdict(found: Verdict, seconds: dict[str, float]) -> Verdict:
    """Where nothing holds up the steps, a long start may be what is worth knowing."""
    share = seconds.get("start", 0.0) / max(sum(seconds.values()), 1e-9)
    if found.bottleneck != "compute" or share < 0.5:
        return found
    return dataclasses.replace(
        found, evidence=f"{found.evidence} once it runs, and {share:.0%} of this start was start-up"
    )


def _rounded(earlier_s: float | None, before_clock_s: float, first_step_s: float | None) -> float | None:
    if earlier_s is not None:
        return round(earlier_s, 3)
    return None if first_step_s is None else round(before_clock_s + first_step_s, 3)
