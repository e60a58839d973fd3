"""A run's folder: what is written there, and reading it back."""

import contextlib
import fcntl
import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from shoal.core.errors import UserError
from shoal.core.storage import NO_ROOM, read_json_lines, to_json_line, write_atomically
from shoal.observe.records import Report, Workers

_AT_ONCE = 1000
_MOST_KEPT = 100_000
"""Lines; a disk that stays full must not take the memory too."""


class RunFolder:
    """Writes metrics.jsonl, workers.jsonl, events.jsonl, recipe.yaml and summary.json; one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / ".lock")
        self._metrics: LineFile | None = None
        self._workers: LineFile | None = None
        self._events: LineFile | None = None
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
        forgotten = None
        if resumed_step is not None:
            forgotten = self._forget_after(resumed_step)
        elif (self.path / "events.jsonl").exists():
            raise UserError(f"--run-dir: another run has started in {self.path} meanwhile; choose another folder")
        self._metrics = LineFile(self.path / "metrics.jsonl")
        self._workers = LineFile(self.path / "workers.jsonl")
        self._events = LineFile(self.path / "events.jsonl")
        if forgotten is not None:
            self.event("forgotten", forgotten)

    def close(self) -> None:
        """Let go of files and lock."""
        for file in (self._metrics, self._workers, self._events):
            if file is not None:
                file.close()
        self._lock.release(force=True)

    def _forget_after(self, step: int) -> dict[str, Any] | None:
        """Drop metrics of steps that will be trained again, and a line that a crash cut short; what went into them."""
        path = self.path / "metrics.jsonl"
        kept: list[dict[str, Any]] = []
        dropped: list[dict[str, Any]] = []
        for record in read_json_lines(path):
            (kept if _step_of(record) <= step else dropped).append(record)
        write_atomically(path, "".join(to_json_line(record) + "\n" for record in kept))
        for name in ("events.jsonl", "workers.jsonl"):
            _end_last_line(self.path / name)
        return _lost(dropped, step) if dropped else None

    def report(self, report: Report) -> None:
        """A line in metrics.jsonl, and one in workers.jsonl where it tells of each worker."""
        assert self._metrics is not None
        self._metrics.append(report.to_record())
        if report.workers is not None:
            self.add_workers(report.step, report.workers, report.time)

    def add_workers(self, step: int, workers: Workers, when: float) -> None:
        """A line in workers.jsonl."""
        assert self._workers is not None
        self._workers.append({"time": round(when, 3), "step": step, **vars(workers)})

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """A line in events.jsonl."""
        assert self._events is not None
        self._events.append(event_record(name, fields))

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


class LineFile:
    """JSON lines at the end of a file. Those that the disk does not take now, because it is full, say, are kept, and
    written before the next ones."""

    def __init__(self, path: Path) -> None:
        self._descriptor = _open_to_append(path)
        self._kept: deque[bytes] = deque(maxlen=_MOST_KEPT)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a line, now or when the disk takes it."""
        self._kept.append(_line(record))
        self._write()

    def close(self) -> None:
        """Let go of the file; what the disk has not taken until now is lost."""
        if self._kept:
            self._write()
        with contextlib.suppress(OSError):  # some file systems tell here what they could not write
            os.close(self._descriptor)

    def _write(self) -> None:
        while self._kept:  # a few at a time: on a disk that stays full there may be very many
            few = [line for _, line in zip(range(_AT_ONCE), self._kept, strict=False)]
            if not _append(self._descriptor, b"".join(few)):
                return
            for _ in few:
                self._kept.popleft()


def append_event(path: Path, record: Mapping[str, Any]) -> bool:
    """Add a line to events.jsonl; whether the disk has taken it."""
    descriptor = _open_to_append(path)
    try:
        return _append(descriptor, _line(record))
    finally:
        os.close(descriptor)


def _open_to_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _line(record: Mapping[str, Any]) -> bytes:
    return to_json_line(dict(record)).encode() + b"\n"


def _append(descriptor: int, content: bytes) -> bool:
    """All of it or nothing, in one piece: rank 0 and a launcher on another machine may both have something to say."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        size = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, content)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False
        if written < len(content):
            os.ftruncate(descriptor, size)
        return written == len(content)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def event_record(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A line of events.jsonl; the time is now, unless it is given."""
    return {"time": time.time(), "event": name, **fields}


def _end_last_line(path: Path) -> None:
    """What is written after a line that a crash cut short must not be taken for its end."""
    if path.exists() and (size := path.stat().st_size):
        with path.open("r+b") as file:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _lost(reports: list[dict[str, Any]], after_step: int) -> dict[str, Any]:
    """What an event says of reports whose steps were lost: how far they went, until when, and their seconds."""
    seconds: dict[str, float] = {}
    for report in reports:
        told = report.get("seconds")
        for phase, value in told.items() if isinstance(told, dict) else ():
            if isinstance(value, int | float):
                seconds[phase] = round(seconds.get(phase, 0.0) + value, 6)
    steps = [step for report in reports if math.isfinite(step := _step_of(report))]
    times = [when for report in reports if isinstance(when := report.get("time"), int | float)]
    last = {"to_step": int(max(steps, default=after_step)), "until": max(times, default=None)}
    return {"after_step": after_step, **last, "seconds": seconds}


def _step_of(record: Mapping[str, Any]) -> float:
    """The step of a report; one that cannot be read counts as one to forget."""
    step = record.get("step")
    return step if isinstance(step, int | float) else float("inf")
