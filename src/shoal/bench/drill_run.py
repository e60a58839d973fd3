"""A real `shoal train` in a process of its own, followed from outside: by its folder alone, as any tool could."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from shoal.core.errors import RunError, UserError
from shoal.observe.runs import is_locked, read_events

_LOOK_EVERY_S = 0.02
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
        """Wait until that step is reported; the newest that is."""
        while (reached := self._last_step()) < step:
            if self._is_over():
                raise OverError(f"the run ended with status {self.status} before step {step}")
            self._sleep()
        return reached

    def _last_step(self) -> int:
        with contextlib.suppress(FileNotFoundError), self.reports_as_they_are() as file:
            return last_step(file)
        return 0

    def wait_for_end(self) -> int:
        """The exit status; `TimeoutError` if it takes longer than is borne."""
        while not self._is_over():
            self._sleep()
        assert self.status is not None
        return self.status

    def _sleep(self) -> None:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"the run was not over after {self.limit_s:.0f} s")
        time.sleep(_LOOK_EVERY_S)

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


class Victim:
    """A worker's process on this machine, held by a descriptor: signals cannot reach another that gets its number."""

    def __init__(self, worker: Mapping[str, Any]) -> None:
        self.rank = int(worker["rank"])
        self.pid = int(worker["pid"])
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            raise OverError(f"the process of worker {self.rank} had ended") from None
        except PermissionError as error:
            raise RunError(f"process {self.pid} of worker {self.rank} cannot be reached: {error.strerror}") from error
        words = _command_line(self.pid)
        if b"shoal" not in words:
            os.close(self._descriptor)
            if not words:
                raise OverError(f"the process of worker {self.rank} had ended")
            raise RunError(f"process {self.pid} on this machine is no worker of a run; it is left alone")

    def send(self, number: signal.Signals) -> None:
        """A signal; one to a process that has ended is none."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def has_ended(self, within_s: float) -> bool:
        """Wait for its end."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, within_s) * 1000))

    def close(self) -> None:
        """Let go; one that was stopped runs again."""
        self.send(signal.SIGCONT)
        os.close(self._descriptor)


@contextlib.contextmanager
def held(*workers: Mapping[str, Any]) -> Iterator[list[Victim]]:
    """Workers as victims."""
    with contextlib.ExitStack() as stack:
        victims = []
        for worker in workers:
            victims.append(Victim(worker))
            stack.callback(victims[-1].close)
        yield victims


def on_this_machine(workers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that signals reach from here."""
    here = [worker for worker in workers if worker["host"] == socket.gethostname()]
    if not here:
        hosts = ", ".join(sorted({worker["host"] for worker in workers}))
        raise UserError(
            f"--address: the workers run on {hosts}, and signals reach only those on this machine "
            f"({socket.gethostname()}); start the drill there"
        )
    return here


def last_step(file: BinaryIO) -> int:
    """The newest step in a file of reports; 0 before there is one."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # the last may be cut
            return int(json.loads(line)["step"])
    return 0


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
