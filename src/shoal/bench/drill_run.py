"""A real `shoal train` in a process of its own, followed from outside: by its folder alone, as any tool could."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from shoal.observe.runs import is_locked, read_events

_LOOK_EVERY_S = 0.02
_LOOK_CLOSELY_EVERY_S = 0.0002
"""A small model is saved within milliseconds."""
_WRITING = ".writing-step-*"
_SAVES_BEFORE = 2
"""A run is well under way when so many checkpoints are committed."""
_END_WITHIN_S = 20.0
_TAIL_BYTES = 16_384


class OverError(Exception):
    """The run ended before it could be broken."""


class TrainRun:
    """One run in its folder, by one command or by several one after the other, the later ones with --resume."""

    def __init__(self, run_dir: Path, arguments: Sequence[str], environment: Mapping[str, str], limit_s: float) -> None:
        """`arguments`: those of every command, the recipe's not included. `limit_s`: how long all may take."""
        self.run_dir = run_dir
        self.status: int | None = None
        self.deadline = time.monotonic() + limit_s
        self.limit_s = limit_s
        self._arguments = list(arguments)
        self._environment = dict(environment)
        self._log = run_dir.with_name(f"{run_dir.name}.log")
        self._out = run_dir.with_name(f"{run_dir.name}.out")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, words: Sequence[str]) -> None:
        """Begin, with the recipe and overrides that are given."""
        self._start([*words, "--run-dir", str(self.run_dir)])

    def resume(self) -> None:
        """Go on after an end."""
        self._start(["--resume", str(self.run_dir)])

    def _start(self, words: list[str]) -> None:
        command = [sys.executable, "-m", "shoal.cli.main", "train", *words, *self._arguments, "--json"]
        with self._log.open("ab") as log, self._out.open("wb") as out:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                command,
                env=dict(os.environ) | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for the drill, which ends its runs
            )

    def wait_for_step(self, step: int) -> int:
        """Wait until that step is reported and two checkpoints are committed; the newest step that is reported."""
        while (reached := self._last_step()) < step or self._num_saves() < _SAVES_BEFORE:
            if self._is_over():
                raise OverError(f"the run ended with status {self.status} before step {step}")
            self._sleep()
        return reached

    def _last_step(self) -> int:
        with contextlib.suppress(FileNotFoundError), self.reports_as_they_are() as file:
            return last_step(file)
        return 0

    def _num_saves(self) -> int:
        return sum(event["event"] == "save" for event in read_events(self.run_dir))

    def wait_for_save(self) -> Path:
        """The folder in which a checkpoint is being put together, as soon as there is one that is not there now."""
        before = set(self.checkpoints.glob(_WRITING))
        while not (new := set(self.checkpoints.glob(_WRITING)) - before):
            if self._is_over():
                raise OverError(f"the run ended with status {self.status} before a save of it was seen")
            self._sleep(_LOOK_CLOSELY_EVERY_S)
        return new.pop()

    def wait_for_failed_saves(self, count: int, is_hopeless: Callable[[], bool]) -> bool:
        """Wait until so many saves have come to nothing; False where there can be no more of them."""
        failed = FailedSaves(self.checkpoints)
        while failed.look() < count:
            if self._is_over() or is_hopeless():
                return False
            self._sleep()
        return True

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.run_dir / "checkpoints"

    def wait_for_end(self) -> int:
        """The exit status; `TimeoutError` if it takes longer than is borne."""
        while not self._is_over():
            self._sleep()
        assert self.status is not None
        return self.status

    def _sleep(self, seconds: float = _LOOK_EVERY_S) -> None:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"the run was not over after {self.limit_s:.0f} s")
        time.sleep(seconds)

    def _is_over(self) -> bool:
        assert self._process is not None
        self.status = self._process.poll()
        return self.status is not None

    def interrupt(self) -> int:
        """Ctrl-C to the launcher; its status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        return self.wait_for_end()

    def kill(self) -> None:
        """SIGKILL to the launcher alone; what it has started must find out by itself."""
        assert self._process is not None
        self._process.kill()
        self.wait_for_end()

    def wait_until_free(self) -> None:
        """Wait until nobody trains in the folder."""
        while is_locked(self.run_dir):
            self._sleep()

    def end(self) -> None:
        """End what still runs: asked first, so that it can end its workers and its Ray."""
        if self._process is None or self._process.poll() is not None:
            return
        try:
            self._process.terminate()
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if self._process.poll() is None:  # also where a second Ctrl-C cut the waiting short
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def summary(self) -> dict[str, Any]:
        """What the last command printed last; empty where it printed nothing."""
        lines = self._out.read_text(encoding="utf-8", errors="replace").splitlines() if self._out.is_file() else []
        with contextlib.suppress(IndexError, ValueError):
            value = json.loads(lines[-1])
            return value if isinstance(value, dict) else {}
        return {}

    def complaint(self) -> str:
        """What the last command said went wrong."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines() if self._log.is_file() else []
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return "\n".join(errors[-5:] or lines[-5:])

    def workers(self) -> list[dict[str, Any]]:
        """The workers of the newest start."""
        found = [event["workers"] for event in read_events(self.run_dir) if event["event"] == "workers"]
        return list(found[-1]) if found else []

    def reports_as_they_are(self) -> BinaryIO:
        """metrics.jsonl, held open: a restart puts another file in its place, and this one keeps what was there."""
        return (self.run_dir / "metrics.jsonl").open("rb")


class FailedSaves:
    """Counts saves that come to nothing, by the folder of a run's checkpoints alone: something was put there and is
    gone again, and the checkpoints are the same ones as before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self._before: tuple[int, frozenset[str]] | None = None

    def look(self) -> int:
        """How many there were since the first look; of several between two looks one is seen."""
        changed = self.folder.stat().st_mtime_ns
        names = frozenset(path.name for path in self.folder.iterdir())
        if any(name.startswith(".") for name in names):  # a checkpoint is being written or deleted just now
            return self.count
        if self._before is not None and names == self._before[1] and changed != self._before[0]:
            self.count += 1
        self._before = (changed, names)
        return self.count


def last_step(file: BinaryIO) -> int:
    """The newest step in a file of reports; 0 before there is one."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # the last may be cut
            return int(json.loads(line)["step"])
    return 0
