"""A warm process that trainers are forked from: torch is imported once a machine, and a trainer starts in milliseconds.

The nursery imports what a trainer needs, then waits for owners to connect. Each request of an owner carries a trainer's
job and the file descriptors it is to use; the nursery forks, answers with the child's pid, and tells later how it
ended. It has a single thread and touches no GPU, so forking is safe. The children of an owner that goes are killed, and
when the last owner has gone, so does the nursery.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST_BYTES = 8 << 20
_PR_SET_PDEATHSIG = 1
_UNUSED_S = 60.0
"""A nursery that nobody has connected to within so long ends."""


def new_nursery_name() -> str:
    """A name for the nurseries of one run: one on each of its machines."""
    return secrets.token_hex(8)


class Nursery:
    """An owner's side: connects to the nursery of this `name` on this machine, which is started if there is none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = _connect_or_start(_folder(), name)

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
        """Let go: every child that is left is ended."""
        self._socket.close()


def _folder() -> Path:
    """Where this user's nurseries listen; nobody else may look in."""
    folder = Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise PermissionError(f"{folder} is open to others; remove it")
    return folder


def _connect_or_start(folder: Path, name: str) -> socket.socket:
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / name
        connection = _connection()
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
            # Bound here, so that owners can connect at once and wait for the imports in the queue.
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
                listening.bind(str(path))
                listening.listen(1024)
                _start(listening, path)
            connection.connect(str(path))
        return connection


def _connection() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
    return connection


def _start(listening: socket.socket, path: Path) -> None:
    subprocess.Popen(  # noqa: S603 - ourselves
        [sys.executable, "-m", "shoal.launch.nursery", str(listening.fileno()), str(path)],
        pass_fds=[listening.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is for the launcher, which tells the trainers
    ).wait()  # it leaves its parent at once: the owner that started it may go before the others


def main() -> None:
    """The nursery itself."""
    if os.fork():
        os._exit(0)
    listening, path = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    _preload()
    try:
        _serve(listening)
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            path.with_name(f"{path.name}.lock").unlink()


def _serve(listening: socket.socket) -> None:
    # Children that end wake the loop through this pipe.
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    owners: dict[int, socket.socket] = {}
    children: dict[int, int] = {}
    """pid -> its owner's descriptor"""
    while True:
        ready, _, _ = select.select([listening.fileno(), reader, *owners], [], [], None if owners else _UNUSED_S)
        if not ready:
            return
        if listening.fileno() in ready:
            owner, _ = listening.accept()
            owners[owner.fileno()] = owner
        if reader in ready:
            os.read(reader, 4096)
            _tell_ended(owners, children)
        for descriptor in [descriptor for descriptor in ready if descriptor in owners]:
            if not _answer(owners[descriptor], children, [listening.fileno(), reader, writer, *owners]):
                owners.pop(descriptor).close()
                for pid in [pid for pid, owner_of in children.items() if owner_of == descriptor]:
                    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
                    children[pid] = -1
                if not owners and not _has_caller(listening):
                    return


def _has_caller(listening: socket.socket) -> bool:
    """Whether somebody is about to connect."""
    return bool(select.select([listening], [], [], 0)[0])


def _answer(owner: socket.socket, children: dict[int, int], ours: list[int]) -> bool:
    """Take one request; False if the owner has gone."""
    try:
        raw, descriptors, _, _ = socket.recv_fds(owner, _MOST_BYTES, 8)
    except ConnectionError:
        raw = b""
    if not raw:
        return False
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _be_trainer(json.loads(raw), descriptors, ours)
    for descriptor in descriptors:
        os.close(descriptor)
    children[pid] = owner.fileno()
    _send(owner, {"what": "forked", "pid": pid})
    return True


def _tell_ended(owners: dict[int, socket.socket], children: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            owner = owners.get(children.pop(pid, -1))
            if owner is not None:
                _send(owner, {"what": "ended", "pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _send(owner: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it has gone; the next look at it will tell
        owner.send(json.dumps(message).encode())


def _be_trainer(job: dict[str, Any], descriptors: list[int], ours: list[int]) -> None:
    """Become the trainer; never returns."""
    status = 1
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for descriptor in ours:
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


def _preload() -> None:
    """Import what every trainer needs; what its first step would import lazily as well."""

    import shoal.launch.trainer
    import shoal.train.worker  # noqa: F401


if __name__ == "__main__":
    main()
