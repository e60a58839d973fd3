"""A warm process that trainers are forked from: torch is imported once, and a trainer starts in milliseconds.

The nursery imports what a trainer needs, then waits on a socket. Each request carries the trainer's job and the file
descriptors it is to use; the nursery forks, answers with the child's pid, and later tells how it ended. It has a single
thread and touches no GPU, so forking is safe. It ends when its owner does, and takes its children with it.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from typing import Any

_MOST_BYTES = 8 << 20
_PR_SET_PDEATHSIG = 1


class Nursery:
    """The owner's side: starts the warm process and asks it for children."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-m", "shoal.launch.nursery", str(theirs.fileno())],
                env={**os.environ, **(environment or {})},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for the launcher, which tells the trainers
            )

    def fork(self, job: Mapping[str, Any], *descriptors: int) -> int:
        """The pid of a new child that runs `job`; its first three descriptors become channel, stdout and stderr."""
        socket.send_fds(self._socket, [json.dumps(job).encode()], descriptors)
        while (answer := self._receive()).get("what") != "forked":
            pass  # the end of an earlier child, which nobody waits for any more
        return int(answer["pid"])

    def wait(self, pid: int, timeout_s: float) -> int | None:
        """How the child ended, as `subprocess` would say it; None if it has not within the time."""
        while select.select([self._socket], [], [], timeout_s)[0]:
            answer = self._receive()
            if answer.get("what") == "ended" and answer["pid"] == pid:
                return int(answer["status"])
        return None

    def _receive(self) -> dict[str, Any]:
        raw = self._socket.recv(1 << 16)
        if not raw:
            raise ConnectionError("the process that trainers are forked from is gone")
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def close(self) -> None:
        """End the nursery and every child that is left."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def main() -> None:
    """The nursery itself."""
    control = socket.socket(fileno=int(sys.argv[1]))
    _preload()
    # Children that end wake the loop below through this pipe.
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        ready, _, _ = select.select([control.fileno(), reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            _tell_ended(control)
        if control.fileno() in ready:
            raw, descriptors, _, _ = socket.recv_fds(control, _MOST_BYTES, 8)
            if not raw:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _be_trainer(json.loads(raw), control, descriptors, (reader, writer))
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(json.dumps({"what": "forked", "pid": pid}).encode())


def _tell_ended(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            control.send(
                json.dumps({"what": "ended", "pid": pid, "status": os.waitstatus_to_exitcode(status)}).encode()
            )


def _be_trainer(job: dict[str, Any], control: socket.socket, descriptors: list[int], pipe: tuple[int, int]) -> None:
    """Become the trainer; never returns."""
    status = 1
    try:
        _die_with_parent()
        control.close()
        for descriptor in pipe:
            os.close(descriptor)
        channel, stdout, stderr, *others = descriptors
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        from shoal.launch.trainer import run_trainer

        status = run_trainer(job, channel, others)
    except BaseException:  # noqa: BLE001 - the last place before the process ends
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _die_with_parent() -> None:
    """Be killed when the parent ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _preload() -> None:
    """Import what every trainer needs; what a first step would import lazily as well."""

    import shoal.launch.trainer
    import shoal.train.worker  # noqa: F401


if __name__ == "__main__":
    main()
