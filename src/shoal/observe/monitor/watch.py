"""What is known of a run that somebody else carries out: its files, read as they grow."""

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import yaml

from shoal.observe.monitor.happened import Happened
from shoal.observe.monitor.reports import Reports
from shoal.observe.monitor.tail import Tail

_SAME_CLOCK_S = 2.0


class RunWatch:
    """A run's folder, looked at again and again. Whatever is in it, or no longer in it, is no error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports = Reports()
        self.happened = Happened()
        self.workers: dict[str, Any] = {}
        """The newest line of workers.jsonl."""
        self.recipe: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.is_gone = False
        self.is_behind = False
        """There is more in the files than was read until now."""
        self._tails = {name: Tail(path / f"{name}.jsonl") for name in ("events", "metrics", "workers")}
        self._whole: dict[str, tuple[int, int, int]] = {}
        """Small files as they were when they were read: inode, size, time."""
        self._changed_at = time.monotonic()
        self._was_silent_s: float | None = None
        """For how long nothing had been written when this was first seen; None: not looked yet."""
        self._lag_s: float | None = None
        """The least time between the writer's clock and ours when something new was seen."""

    def poll(self, budget_s: float = math.inf) -> None:
        """Read what is new, for about that long; what is left is read next time."""
        until, before = time.monotonic() + budget_s, self._read_so_far()
        is_first = self._was_silent_s is None
        if is_first:
            self._was_silent_s = max(0.0, time.time() - _last_written(self.path))
        self.is_gone = not self.path.is_dir()
        if (recipe := self._read_whole("recipe.yaml")) is not None:
            self.recipe = _parse_yaml(recipe)
        if (summary := self._read_whole("summary.json")) is not None:
            self.summary = _parse_json(summary)
        was_behind, self.is_behind = self.is_behind, False
        for name, tail in self._tails.items():
            self._follow(name, tail, until)
        if not is_first and not was_behind and self._read_so_far() != before:
            self._changed_at, self._was_silent_s = time.monotonic(), 0.0
            lag_s = time.time() - self._newest()
            self._lag_s = lag_s if self._lag_s is None else min(self._lag_s, lag_s)

    def _follow(self, name: str, tail: Tail, until: float) -> None:
        while True:
            piece = tail.read()
            if piece.is_anew:
                self._forget(name)
            for record in piece.records:
                if name == "metrics":
                    self.reports.add(record, self.happened.session_began)
                elif name == "events":
                    self.happened.add(record)
                else:
                    self.workers = record
            if not piece.is_behind:
                return
            if time.monotonic() >= until:
                self.is_behind = True
                return

    def _forget(self, name: str) -> None:
        if name == "metrics":
            self.reports = Reports()
        elif name == "events":
            self.happened = Happened()
        else:
            self.workers = {}

    def _read_so_far(self) -> list[tuple[int, int]]:
        return [(tail.offset, tail.size) for tail in self._tails.values()]

    def _newest(self) -> float:
        return max(self.happened.newest, self.reports.time)

    def _read_whole(self, name: str) -> str | None:
        """A small file, if it is another than before."""
        try:
            stat = (self.path / name).stat()
            mark = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if self._whole.get(name) == mark:
                return None
            text = (self.path / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        self._whole[name] = mark
        return text

    def clock(self) -> float:
        """The time on the machine that writes, in unix seconds: on shared storage its clock may not be ours."""
        if self._lag_s is not None:
            return time.time() - (self._lag_s if abs(self._lag_s) > _SAME_CLOCK_S else 0.0)
        if self.happened.ended_by or not self._newest():
            return max(time.time(), self._newest())
        return self._newest() + self.silent_s()

    def silent_s(self) -> float:
        """For how long nothing has been written: as seen from here and, before that, as the files' times say."""
        return time.monotonic() - self._changed_at + (self._was_silent_s or 0.0)

    def read_share(self) -> float:
        """How much of the files has been read."""
        sizes = sum(tail.size for tail in self._tails.values())
        return sum(tail.offset for tail in self._tails.values()) / sizes if sizes else 1.0


def _last_written(path: Path) -> float:
    times = [0.0]
    for file in (path, *(path / f"{name}.jsonl" for name in ("events", "metrics", "workers"))):
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times)


def _parse_yaml(text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _parse_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
