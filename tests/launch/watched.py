"""Runs of `shoal train` in a process of their own, that a test watches and breaks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.observe.runs import read_events, read_metrics

STEPS = 300
RECIPE = [
    "synthetic_mlp",
    f"train.steps={STEPS}",
    "train.global_batch=48",
    "model.hidden=[256,256]",
    "data.samples=3000",
    "data.val_samples=300",
    "checkpoint.every_steps=20",
    "evaluate.every_steps=150",
    "observe.every_steps=1",
    "cluster.gpus_per_worker=0",
]


class Run:
    """A `shoal train` that a test watches and breaks."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        before: list[str] | None = None,
    ) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        command = [*(before or []), sys.executable, "-m", "shoal.cli.main", "train", "--json", *arguments]
        if "--resume" not in arguments:
            command += ["--run-dir", str(folder)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | (environment or {}),
                start_new_session=True,
                text=True,
            )

    def wait_for(self, seen: Callable[[list[dict[str, Any]]], bool], within_s: float = 90.0) -> list[dict[str, Any]]:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            events = read_events(self.folder) if self.folder.is_dir() else []
            if seen(events):
                return events
            assert self.process.poll() is None, f"ended early: {self.log.read_text()[-2000:]}"
            time.sleep(0.02)
        raise AssertionError(f"not seen: {self.log.read_text()[-2000:]}")

    def wait_for_saves(self, count: int) -> list[dict[str, Any]]:
        """The workers, once so many checkpoints are saved."""
        events = self.wait_for(lambda events: sum(event["event"] == "save" for event in events) >= count)
        workers: list[dict[str, Any]] = next(e["workers"] for e in reversed(events) if e["event"] == "workers")
        return workers

    def end(self, status: int = 0, within_s: float = 120.0) -> dict[str, Any]:
        try:
            stdout, _ = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"did not end: {self.log.read_text()[-2000:]}") from None
        assert self.process.returncode == status, self.log.read_text()[-3000:]
        summary: dict[str, Any] = json.loads(stdout.splitlines()[-1]) if stdout.strip() else {}
        return summary

    def after(self, when: float, name: str) -> float:
        """Seconds from `when` to the first such event after it."""
        return (
            next(event["time"] for event in read_events(self.folder) if event["event"] == name and event["time"] > when)
            - when
        )


def losses_of(folder: Path, steps: int = STEPS) -> list[float]:
    reports = [record for record in read_metrics(folder) if "train_loss" in record["metrics"]]
    assert [record["step"] for record in reports] == list(range(1, steps + 1)), "a step is missing or there twice"
    return [record["metrics"]["train_loss"] for record in reports]
