"""The processes of a run's workers on this machine, which a drill stops, limits and ends."""

import contextlib
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.bench.drill_run import OverError
from shoal.core.errors import RunError, UserError

_LOOK_EVERY_S = 0.0002


@contextlib.contextmanager
def held(*workers: Mapping[str, Any]) -> Iterator[list["Victim"]]:
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


def _stands(pid: int) -> bool:
    """Whether every thread is stopped."""
    with contextlib.suppress(OSError):  # one that has just ended
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)
    return False


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


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

    def stop(self) -> None:
        """SIGSTOP; when this returns, none of its threads runs, not even one that was writing a file."""
        self.send(signal.SIGSTOP)
        while not self.has_ended(0.0) and not _stands(self.pid):
            time.sleep(_LOOK_EVERY_S)

    @contextlib.contextmanager
    def files_up_to(self, num_bytes: int) -> Iterator[None]:
        """While entered, none of its files may grow beyond so many bytes: to itself, the disk is full."""
        try:
            soft, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (num_bytes, hard))
        except ProcessLookupError:
            raise OverError(f"the process of worker {self.rank} had ended") from None
        except PermissionError as error:
            raise RunError(f"process {self.pid} of worker {self.rank} cannot be limited: {error.strerror}") from error
        try:
            yield
        finally:
            if not self.has_ended(0.0):
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (soft, hard))

    def has_ended(self, within_s: float) -> bool:
        """Wait for its end."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, within_s) * 1000))

    def close(self) -> None:
        """Let go; one that was stopped runs again."""
        self.send(signal.SIGCONT)
        os.close(self._descriptor)
