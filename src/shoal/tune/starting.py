"""A trial's run as it starts now: anew, from its last checkpoint, or not at all because it is done."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import UserError
from shoal.launch.run import Prepared
from shoal.observe.runs import is_locked, read_run
from shoal.tune.setup import Setup
from shoal.tune.trial import Trial

_FREED_WITHIN_S = 60.0
"""How long a folder may stay locked by workers of a tuner that was killed."""


def prepared_run(setup: Setup, trial: Trial, run_dir: Path, extra: Mapping[str, Any]) -> Prepared:
    """What to start. `extra`: fields that every trial's recipe gets besides."""
    loaded = setup.recipe_of(trial.config, extra)
    deadline = time.monotonic() + _FREED_WITHIN_S
    while is_locked(run_dir) and time.monotonic() < deadline:
        time.sleep(0.1)
    if (run_dir / "recipe.yaml").is_file():
        run = read_run(run_dir)
        is_done = run.status == "done" and run.summary.get("status") == "done"
        return Prepared(loaded, run_dir, resume=True, finished=run.summary if is_done else None)
    if trial.lineage:
        raise UserError(f"{run_dir} is gone, and with it the weights that trial {trial.number} had taken over")
    shutil.rmtree(run_dir, ignore_errors=True)  # what a start left that did not come so far
    return Prepared(loaded, run_dir)


def prune(trials: Mapping[int, Trial], setup: Setup, folder: Path) -> None:
    """Where that was asked for, delete the checkpoints of trials that have ended, and of what trials were before they
    took over another's weights, but for the best."""
    keep = setup.section.keep_checkpoints
    if keep is None or len(setup.objectives) > 1:
        return
    objective = setup.objective
    # Trials that have failed may be started again, and need theirs for that.
    over = [life for trial in trials.values() for life in trial.lives() if life.status in ("done", "stopped")]
    ranked = sorted(over, key=lambda life: (objective.loss(life.value(objective)), life.number))
    for life in ranked[keep:]:
        shutil.rmtree(folder / "trials" / life.name / "checkpoints", ignore_errors=True)
