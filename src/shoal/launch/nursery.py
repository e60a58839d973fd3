"""A warm process that trainers are forked from: torch is imported once a machine, and a trainer starts in milliseconds.

The nursery imports what a trainer needs, then waits for owners to connect. Each request of an owner carries the file
descriptors of a trainer, its job among them; the nursery forks, answers with the child's pid, and tells later how it
ended. It starts no threads and touches no GPU, so forking is safe. The children of an owner that goes are killed, and
when the last owner has gone, so does the nursery.
"""

import contextlib
import errno
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
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.core.sessions import end_with_parent, kill_session

_LONGEST_MESSAGE = 4096
_UNUSED_S = 60.0
"""A nursery that nobody has connected to within so long ends."""


def new_nursery_name() -> str:
    """A name for the nurseries of one run: one on each of its machines."""
    return secrets.token_hex(8)


class Nursery:
    """An owner's side: connects to the nursery of this `name` on this machine, which is started if there is none.

    Only one thread may talk to it at a time; any may `end` it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = _connect_or_start(_folder(), name)

    def fork(self, job: Mapping[str, Any], *descriptors: int) -> int:
        """The pid of a new child that runs `job`; its first three descriptors become channel, stdout and stderr.

        The child leads a session, so that what it starts can be ended with it.
        """
        with open(os.memfd_create("job"), "w+b") as file:  # noqa: PTH123 - a message would be limited in size
            file.write(json.dumps(job).encode())
            file.seek(0)
            socket.send_fds(self._socket, [b"fork"], [file.fileno(), *descriptors])
        while True:
            answer = self._receive()
            if answer["what"] == "forked":
                return int(answer["pid"])
            if answer["what"] == "refused":
                raise OSError(f"no process can be started: {answer['error']}")
            # else the end of an earlier child, which nobody waits for any more

    def fileno(self) -> int:
        """What becomes readable when there is news."""
        return self._socket.fileno()

    def ended(self, pid: int) -> int | None:
        """The next news: how that child ended, as `subprocess` would say it; None if it is of another."""
        answer = self._receive()
        return int(answer["status"]) if answer["what"] == "ended" and answer["pid"] == pid else None

    def _receive(self) -> dict[str, Any]:
        raw = self._socket.recv(_LONGEST_MESSAGE)
        if not raw:
            raise ConnectionError("the process that trainers are forked from is gone")
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def end(self) -> None:
        """Let go: every child that is left is ended. Whoever waits for news learns that there will be none."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """As `end`, when nobody waits any more."""
        self.end()
        self._socket.close()


def _folder() -> Path:
    """Where this user's nurseries listen; nobody else may look in."""
    folder = Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise PermissionError(errno.EPERM, "is open to others; remove it, or set TMPDIR to another folder", str(folder))
    return folder


def _machine() -> str:
    """What keeps containers and network namespaces apart that share a folder for temporary files."""
    return "-".join(str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("net", "pid"))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """While nobody else connects, starts or ends: nobody is left with a nursery that is about to go."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """The path as a socket's address, which may have a hundred bytes: folders for temporary files may have more."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _connect_or_start(folder: Path, name: str) -> socket.socket:
    path = folder / f"{name}-{_machine()}"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _locked(folder), short_address(path) as address:
            try:
                connection.connect(address)
            except (FileNotFoundError, ConnectionRefusedError):
                path.unlink(missing_ok=True)
                # Bound here, so that owners can connect at once and wait for the imports in the queue.
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
                    listening.bind(address)
                    listening.listen(1024)
                    _start(listening, path)
                connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _start(listening: socket.socket, path: Path) -> None:
    subprocess.Popen(  # noqa: S603 - ourselves
        [sys.executable, "-P", "-m", "shoal.launch.nursery", str(listening.fileno()), str(path)],
        pass_fds=[listening.fileno()],
        # torch warns of host names that cannot be looked up; whoever wants to see that says so.
        env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # the command's own is for its summary
        stderr=None if _is_open(2) else subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is for the launcher, which tells the trainers
    ).wait()  # it leaves its parent at once: the owner that started it may go before the others


def _is_open(descriptor: int) -> bool:
    """Whether a child would have it: a command may be started without stderr (`2>&-`)."""
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


def main() -> None:
    """The nursery itself."""
    if os.fork():
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())  # whoever starts a Ray of its own holds some back
    # What is sent to every process of a job is for the launcher and the trainers. SIGUSR1 is for trainers with a
    # handler; until they have set it, it must not end them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):  # already here: only before they become pipes
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    listening, path = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    try:
        _preload()
        _serve(listening, path)
    except BaseException:
        path.unlink(missing_ok=True)  # still our own: nobody else listens there as long as we do
        raise


def _serve(listening: socket.socket, path: Path) -> None:
    # Children that end wake the loop through this pipe.
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    owners: dict[int, socket.socket] = {}
    children: dict[int, int] = {}
    """pid -> its owner's descriptor"""
    while True:
        ready, _, _ = select.select([listening.fileno(), reader, *owners], [], [], None if owners else _UNUSED_S)
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
                    kill_session(pid)  # not reaped yet, so the number is still its own
                    children[pid] = -1
        if not owners:
            with _locked(path.parent):
                if not select.select([listening], [], [], 0)[0]:  # nobody is about to connect
                    path.unlink(missing_ok=True)
                    return


def _answer(owner: socket.socket, children: dict[int, int], ours: list[int]) -> bool:
    """Take one request; False if the owner has gone."""
    try:
        raw, descriptors, _, _ = socket.recv_fds(owner, _LONGEST_MESSAGE, 8)
    except ConnectionError:
        raw = b""
    if not raw:
        return False
    try:
        pid = _fork(descriptors, ours)
    except OSError as error:
        _send(owner, {"what": "refused", "error": str(error)})
        return True
    finally:  # in the nursery alone: the child never gets here
        for descriptor in descriptors:
            os.close(descriptor)
    children[pid] = owner.fileno()
    _send(owner, {"what": "forked", "pid": pid})
    return True


def _fork(descriptors: list[int], ours: list[int]) -> int:
    """The pid of a new trainer, which never returns from here."""
    sys.stdout.flush()
    sys.stderr.flush()
    nursery = os.getpid()
    leads, is_leading = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: those of OpenBLAS, which is made for being forked
            pid = os.fork()
        if pid == 0:
            _be_trainer(nursery, descriptors, [*ours, leads], is_leading)
    finally:  # in the nursery alone: the child never gets here
        os.close(is_leading)
        os.read(leads, 1)  # returns when the child has closed it too: the session is there before its number is told
        os.close(leads)
    return pid


def _tell_ended(owners: dict[int, socket.socket], children: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            # What it has started goes too, loader workers and compilers: they hold its files and its locks. Before it
            # is reaped, because until then its number is not given to another.
            kill_session(found.si_pid)
            pid, status = os.waitpid(found.si_pid, 0)
            owner = owners.get(children.pop(pid, -1))
            if owner is not None:
                _send(owner, {"what": "ended", "pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _send(owner: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it has gone; the next look at it will tell
        owner.send(json.dumps(message).encode())


def _be_trainer(nursery: int, descriptors: list[int], ours: list[int], is_leading: int) -> None:
    """Become the trainer; never returns. `is_leading` is closed when it leads a session."""
    status = 1
    try:
        os.setsid()
        os.close(is_leading)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent()
        if os.getppid() != nursery:  # it has gone before it could take this one along
            os._exit(status)
        for descriptor in ours:
            os.close(descriptor)
        job_file, channel, stdout, stderr, *others = descriptors
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        with open(job_file, "rb") as file:  # noqa: PTH123 - a descriptor
            job = json.load(file)
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

    import torch._dynamo  # noqa: F401 - by the first optimizer

    import shoal.launch.trainer
    import shoal.train.worker  # noqa: F401


if __name__ == "__main__":
    main()
