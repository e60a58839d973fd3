"""A run's folder: what is written there, and reading it back."""

import contextlib
import fcntl
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from shoal.core.errors import UserError
from shoal.core.storage import read_json_lines, to_json_line, write_atomically
from shoal.observe.records import Report


class RunFolder:
    """Writes metrics.jsonl, events.jsonl, recipe.yaml and summary.json; one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / ".lock")
        self._metrics: TextIO | None = None
        self._events: TextIO | None = None
        self._stepped = False

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    def lock(self, wait_s: float = 0.5) -> None:
        """Make the folder and be the only process that writes there; a second call is harmless."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Not at once: `shoal runs list` tries every lock for a moment, to see who is at work.
            self._lock.acquire(timeout=wait_s, poll_interval=0.05)
        except Timeout:
            raise UserError(f"--resume: {self.path} is being trained by another process; stop that one first") from None
        except NotImplementedError as error:
            raise UserError(f"--run-dir: {self.path} is on a file system without locks; choose another") from error
        except OSError as error:
            raise UserError(f"--run-dir: {self.path} cannot be written: {error.strerror or error}") from error

    def open(self, resumed_step: int | None) -> None:
        """Start to write; where a run goes on from `resumed_step`, what came after it is forgotten."""
        self.lock()
        if resumed_step is not None:
            self._forget_after(resumed_step)
        elif (self.path / "events.jsonl").exists():
            raise UserError(f"--run-dir: another run has started in {self.path} meanwhile; choose another folder")
        self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = (self.path / "events.jsonl").open("a", encoding="utf-8")

    def close(self) -> None:
        """Let go of files and lock."""
        for file in (self._metrics, self._events):
            if file is not None:
                # Every line is flushed when it is written: what a full disk refused then was raised then.
                with contextlib.suppress(OSError):
                    file.close()
        self._lock.release(force=True)

    def _forget_after(self, step: int) -> None:
        """Drop metrics of steps that will be trained again, and a line that a crash cut short."""
        path = self.path / "metrics.jsonl"
        kept = [record for record in read_json_lines(path) if _step_of(record) <= step]
        write_atomically(path, "".join(to_json_line(record) + "\n" for record in kept))
        events = self.path / "events.jsonl"
        if events.exists() and not events.read_bytes().endswith(b"\n"):
            with events.open("a", encoding="utf-8") as file:
                file.write("\n")

    def report(self, report: Report) -> None:
        """A line in metrics.jsonl."""
        assert self._metrics is not None
        self._metrics.write(to_json_line(report.to_record()) + "\n")
        self._metrics.flush()

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """A line in events.jsonl."""
        assert self._events is not None
        append_event(self._events, name, fields)

    def tick(self, step: int) -> None:
        """The first step since the start is an event: until then a run only gets ready."""
        if not self._stepped:
            self._stepped = True
            self.event("first_step", {"step": step})

    def write_recipe(self, text: str) -> None:
        """recipe.yaml, fully resolved."""
        write_atomically(self.path / "recipe.yaml", text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """summary.json."""
        write_atomically(
            self.path / "summary.json", json.dumps(json.loads(to_json_line(dict(summary))), indent=1) + "\n"
        )


def append_event(file: TextIO, name: str, fields: Mapping[str, Any]) -> None:
    """One line, whole: rank 0 and a launcher on another machine may both have something to say."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        file.write(to_json_line({"time": time.time(), "event": name, **fields}) + "\n")
        file.flush()
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _step_of(record: Mapping[str, Any]) -> float:
    """The step of a report; one that cannot be read counts as one to forget."""
    step = record.get("step")
    return step if isinstance(step, int | float) else float("inf")
