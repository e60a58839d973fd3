"""A disk that takes no more for a while: training goes on, nothing is lost, and it is told."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import RunError
from shoal.launch.run import Launch, launch, prepare
from shoal.observe.console import SilentConsole
from shoal.observe.runs import read_events, read_metrics
from tests.small_recipes import small

STEPS = 30


class At(SilentConsole):
    """Does something at certain steps."""

    def __init__(self, actions: dict[int, Callable[[], object]]) -> None:
        self.actions = actions

    def tick(self, step: int) -> None:
        if step in self.actions:
            self.actions[step]()


def run(folder: Path, data: Path, actions: dict[int, Callable[[], object]], **fields: Any) -> dict[str, Any]:
    overrides = small("digits", data, STEPS) | {
        "observe.every_steps": 1,
        "checkpoint.every_steps": 5,
        "checkpoint.keep_last": 2,
        "cluster.threads_per_worker": 1,
        "cluster.gpus_per_worker": 0,
    }
    return launch(prepare(["digits"], overrides | fields, run_dir=folder), Launch(At(actions)))


def fill(disk: Path) -> None:
    """Leave a few kB."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(b"x" * max(free - 8192, 0))


def steps_and_losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["metrics"]["train_loss"]) for line in read_metrics(folder) if "lr" in line["metrics"]]


def test_a_full_disk_costs_nothing_but_the_checkpoints_of_that_time(small_disk: Path, tmp_path: Path) -> None:
    reference = run(tmp_path / "whole", tmp_path / "data", {})
    folder = small_disk / "run"

    def fill_when_saved() -> None:
        deadline = time.monotonic() + 30  # it is written while training goes on
        while not (folder / "checkpoints" / "step-00000010").is_dir() and time.monotonic() < deadline:
            time.sleep(0.01)
        fill(small_disk)

    found = run(folder, tmp_path / "data", {12: fill_when_saved, 23: (small_disk / "filler").unlink})
    assert found["weights_sha256"] == reference["weights_sha256"]
    assert steps_and_losses(folder) == steps_and_losses(tmp_path / "whole"), "every step once, also those of that time"
    events = read_events(folder)
    failed = [event for event in events if event["event"] == "save_failed"]
    saved = [event["step"] for event in events if event["event"] == "save"]
    assert {event["step"] for event in failed} <= {15, 20} and failed[0]["message"] == "No space left on device"
    assert saved[:2] == [5, 10] and saved[-1] == STEPS and 15 not in saved
    assert not [event for event in events if event["event"] in ("failed", "restart")]
    assert not list((folder / "checkpoints").glob(".*"))
    assert any("save_failures" in line["metrics"] for line in read_metrics(folder)), "told among the metrics too"


def test_failures_in_a_row_stop_the_run_with_what_can_be_done(small_disk: Path, tmp_path: Path) -> None:
    folder = small_disk / "run"
    fields = {"checkpoint.max_failures": 2, "checkpoint.give_up_after_s": 0.5}
    with pytest.raises(RunError, match=r"could not be written to .*: No space left on device; earlier .* untouched"):
        run(folder, tmp_path / "data", {7: lambda: fill(small_disk)}, **fields)
    (small_disk / "filler").unlink()
    steps = [line["step"] for line in read_metrics(folder)]
    assert 15 < steps[-1] < STEPS, "two failures, and no more steps than that"
    again = launch(prepare(resume=folder), Launch(SilentConsole()))
    assert again["resumed_from_step"] == 5 and again["status"] == "done"


def test_a_file_system_that_turns_read_only_is_borne_too(small_disk: Path, tmp_path: Path) -> None:
    def remount(how: str) -> None:
        checkpoints.mkdir(parents=True, exist_ok=True)  # the first save may still be on its way
        # A file that is open for writing keeps a file system from turning read-only, so every folder does instead.
        subprocess.run(["mount", "--bind", str(checkpoints), str(checkpoints)], check=how == "ro", capture_output=True)
        subprocess.run(["mount", "-o", f"remount,bind,{how}", str(checkpoints)], check=True)

    reference = run(tmp_path / "whole", tmp_path / "data", {})
    folder = small_disk / "run"
    checkpoints = folder / "checkpoints"
    try:
        found = run(folder, tmp_path / "data", {7: lambda: remount("ro"), 18: lambda: remount("rw")})
    finally:
        while subprocess.run(["umount", str(checkpoints)], check=False, capture_output=True).returncode == 0:
            pass
    failed = [event for event in read_events(folder) if event["event"] == "save_failed"]
    assert failed and failed[0]["message"] == "Read-only file system"
    assert found["weights_sha256"] == reference["weights_sha256"]
    shutil.rmtree(folder)
