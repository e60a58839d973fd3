"""Which checkpoints of a search are deleted, where only some are to be kept."""

from pathlib import Path
from typing import Any

import pytest

from shoal.tune.setup import Setup, set_up
from shoal.tune.starting import prune
from shoal.tune.trial import Trial
from tests.tune.made_trials import made


def made_setup(**settings: Any) -> Setup:
    return set_up(["digits"], [], {"optim.lr": "loguniform(1e-5, 1e-2)"}, {"metric": "val_loss", **settings})


def left(folder: Path, setup: Setup, *trials: Trial) -> list[str]:
    """Runs that have checkpoints afterwards, of all that these trials have been."""
    for trial in trials:
        for life in trial.lives():
            (folder / "trials" / life.name / "checkpoints").mkdir(parents=True)
    prune({trial.number: trial for trial in trials}, setup, folder)
    return sorted(path.parent.name for path in folder.glob("trials/*/checkpoints"))


TRIALS = [
    made(0, [0.5], "done"),
    made(1, [0.2], "stopped"),
    made(2, [0.4], "done"),
    made(3, [0.1], "failed", kind="exception"),
    made(4, [0.9], "failed", kind="diverged"),
    made(5, [0.8], "running"),
    made(6, [0.7], "paused"),
    made(7, [], "waiting"),
]


@pytest.mark.parametrize(("keep", "best"), [(1, ["0001"]), (2, ["0001", "0002"]), (9, ["0000", "0001", "0002"])])
def test_those_of_the_best_are_kept_and_of_all_that_may_go_on(tmp_path: Path, keep: int, best: list[str]) -> None:
    unfinished = ["0003", "0004", "0005", "0006", "0007"]
    assert left(tmp_path, made_setup(keep_checkpoints=keep), *TRIALS) == sorted([*best, *unfinished])


def test_all_are_kept_unless_said_otherwise(tmp_path: Path) -> None:
    assert len(left(tmp_path, made_setup(), *TRIALS)) == len(TRIALS)


@pytest.mark.parametrize(("before", "expected"), [(0.9, ["0000-1", "0001"]), (0.3, ["0000", "0000-1"])])
def test_what_a_trial_was_before_it_took_over_counts_as_one(tmp_path: Path, before: float, expected: list[str]) -> None:
    heir, other = made(0, [0.6, 0.6], "running"), made(1, [0.5], "done")
    heir.past, heir.generation = [({"optim.lr": 1e-3}, 0.0, made(0, [before]).results)], 1
    heir.lineage = [{"from": 1, "progress": 1.0, "config": {}}]
    assert left(tmp_path, made_setup(keep_checkpoints=1), heir, other) == expected
