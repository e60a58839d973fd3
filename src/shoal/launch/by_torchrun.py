"""Having torchrun start the workers on this machine: `shoal train --launcher torchrun --workers 2`.

torchrun starts the workers, and all of them again when one dies. They connect to this process, which hands out the job,
shows what they report and asks them to stop: the messages are those of workers without torchrun.
"""

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shoal.core.errors import RunError, UserError
from shoal.core.machine import usable_cores
from shoal.core.sessions import kill_session
from shoal.launch import policy
from shoal.launch.account import Account, failure_of
from shoal.launch.crew import LOOPBACK
from shoal.launch.environment import nccl_environment, network_environment
from shoal.launch.lines import LONGEST_PRINT, Lines
from shoal.launch.local import check_shared, threads_of
from shoal.launch.nursery import short_address
from shoal.launch.policy import Failure
from shoal.launch.run import Launch, Prepared

_AGENT = (
    "import ctypes, runpy, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "runpy.run_module('torch.distributed.run', run_name='__main__', alter_sys=True)"
)
"""torchrun, which ends with this process however that ends, and its workers with it."""
_LAST_WORDS_S = 5.0
"""How long to read what workers have said, once torchrun is gone."""


def run_by_torchrun(prepared: Prepared, how: Launch) -> dict[str, Any]:
    """Have torchrun start the workers on this machine, and follow them to the end."""
    cluster = prepared.loaded.recipe.cluster
    if cluster.min_workers is not None:
        raise UserError(
            f"cluster.min_workers: {cluster.min_workers} to {cluster.workers} workers are for Ray, torchrun starts a "
            f"fixed number; give one such as --workers {cluster.workers}, or use --launcher ray"
        )
    check_shared(cluster.workers, usable_cores())
    with tempfile.TemporaryDirectory(prefix="shoal-torchrun-") as folder:
        return _Watch(prepared, how, Path(folder)).run()


class _Stream:
    """What one worker of one start says: its messages, or what it prints."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid: int | None = None
        self.rank = -1
        self.start = -1
        self.name = ""
        self.lines = Lines(connection.fileno())

    def is_called(self, name: str) -> None:
        """What comes: of what is printed, only so much of a line is kept."""
        self.name = name
        self.lines.longest = None if name == "messages" else LONGEST_PRINT

    def read(self) -> list[str]:
        """New lines, and the last one too, whole or not, when there will be no more."""
        lines = self.lines.read()
        return lines if self.lines.is_open or self.name == "messages" else lines + self.lines.rest()

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended, which reading will tell
            self.connection.sendall((json.dumps(message) + "\n").encode())


class _Watch:
    """torchrun and its workers, from here."""

    def __init__(self, prepared: Prepared, how: Launch, folder: Path) -> None:
        self.prepared = prepared
        self.how = how
        self.folder = folder
        self.threads = threads_of(prepared)
        self.node = socket.gethostname()
        self.account = Account(prepared, how)
        self.account.world_size = prepared.loaded.recipe.cluster.workers
        self.start = 0
        self.ended: dict[int, dict[str, Any]] = {}
        self.failures: dict[int, Failure] = {}
        self.stop_sent: str | None = None
        self.has_stepped = False
        """Whether rank 0 of this start has told of a step: until then there is nothing to save."""
        self.is_over = False
        self._streams = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX)

    def run(self) -> dict[str, Any]:
        """The summary of rank 0."""
        with short_address(self.folder / "launcher") as address:
            self._listening.bind(address)
        self._listening.listen(1024)
        self._streams.register(self._listening, selectors.EVENT_READ)
        agent = self._start_torchrun()
        try:
            while agent.poll() is None:
                self._read(0.1)
                self._pass_on_stop()
            self._read_last_words()
            return self._conclude(agent.returncode)
        except KeyboardInterrupt:  # while no workers run that have something to save
            self._end(agent)
            return self.account.interrupted()
        finally:
            self._end(agent)
            self._close()

    def _end(self, agent: "subprocess.Popen[bytes]") -> None:
        """The workers end with torchrun, and what they have started with them: torchrun has each lead a session."""
        self.is_over = True
        workers = {stream.pid for stream in self._workers_streams() if stream.pid is not None}
        agent.kill()
        agent.wait()
        for pid in workers:
            kill_session(pid)
        self._read_last_words()

    def _start_torchrun(self) -> "subprocess.Popen[bytes]":
        recipe = self.prepared.loaded.recipe
        arguments = [
            *("--nnodes", "1", "--nproc-per-node", str(recipe.cluster.workers)),
            *("--max-restarts", str(recipe.failures.max_restarts)),
            # It would listen on every interface, and one process needs no port to meet itself.
            *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-id", "shoal"),
            *("--rdzv-endpoint", str(self.folder / "rendezvous"), "--local-addr", LOOPBACK),
            *("--log-dir", str(self.folder / "logs"), "-m", "shoal.launch.torchrun_worker"),
            str(self.folder / "launcher"),
        ]
        set_here = {"OMP_NUM_THREADS": str(self.threads)} | os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / "torchrun.log").open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - torchrun
                [sys.executable, "-c", _AGENT, *arguments],
                env=set_here,
                stdin=subprocess.DEVNULL,
                stdout=2 if self.how.verbose else log,
                stderr=2 if self.how.verbose else log,
                start_new_session=True,  # a Ctrl-C is for this process, which tells the workers
            )

    def _job(self, start: int) -> dict[str, Any]:
        """What a worker is told, but for its place."""
        recipe = self.prepared.loaded.recipe
        return {
            "recipe": self.prepared.loaded.tree(),
            "run_dir": str(self.account.run_dir),
            "resume": self.prepared.resume,
            "restarts": start,
            "starts": start,
            "started": self.how.started,
            "marks": self.how.marks,
            "launch": self.how.asked,
            "first_step_s": self.account.first_step_s,
            "threads": self.threads,
            "node": self.node,
            "environment": network_environment(LOOPBACK, nccl_environment(recipe.nccl)),
            "directory": os.getcwd(),  # noqa: PTH109 - as a string
            "paths": [path for path in sys.path if path and "site-packages" not in path and Path(path).is_dir()],
            # Nobody watches for a hang: those who wait for the worker notice it.
            "meeting": {"timeout_s": recipe.nccl.timeout_s or recipe.failures.hang_timeout_s},
        }

    def _read(self, timeout_s: float) -> None:
        """What has come in since."""
        for key, _ in self._streams.select(timeout_s):
            if key.fileobj is self._listening:
                connection, _ = self._listening.accept()
                self._streams.register(connection, selectors.EVENT_READ, _Stream(connection))
                continue
            stream: _Stream = key.data
            for line in stream.read():
                self._take(stream, line)
            if not stream.lines.is_open:
                self._streams.unregister(stream.connection)
                stream.connection.close()
                self._miss(stream)

    def _read_last_words(self) -> None:
        """Until every worker is gone: what they have said is still to be read."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._workers_streams() and time.monotonic() < deadline:
            self._read(0.1)

    def _workers_streams(self) -> list[_Stream]:
        return [key.data for key in self._streams.get_map().values() if key.data is not None]

    def _take(self, stream: _Stream, line: str) -> None:
        if not stream.name:
            self._greet(stream, json.loads(line))
        elif stream.name != "messages":
            self.account.see(stream.rank, {"what": "print", "line": line})
        elif stream.start == self.start:
            message = json.loads(line)
            if message["what"] == "tick" and not self.has_stepped:
                self.has_stepped = True
                self.how.enter("training")
            self.account.see(stream.rank, message)
            if message["what"] == "ended":
                self.ended[stream.rank] = message["summary"]
            elif message["what"] == "failed":
                self._fail(failure_of(stream.rank, self.node, message))

    def _greet(self, stream: _Stream, hello: dict[str, Any]) -> None:
        stream.pid, stream.rank, stream.start = hello["pid"], hello["rank"], hello["start"]
        stream.is_called(hello["stream"])
        if stream.start > self.start:
            self._note_restart(stream.start)
        if stream.name == "messages":
            stream.send(self._job(stream.start))
            if self.stop_sent is not None:
                stream.send({"what": "stop", "reason": self.stop_sent})

    def _miss(self, stream: _Stream) -> None:
        """A worker's messages have ended; one that said no word of it was killed."""
        heard = stream.rank in self.ended or stream.rank in self.failures
        if stream.name == "messages" and stream.start == self.start and not heard:
            words = "the worker's process ended without a word: killed, or the machine has run out of memory"
            self._fail(Failure(stream.rank, "died", words, self.node))

    def _fail(self, failure: Failure) -> None:
        """torchrun starts the workers again whatever the reason; where that cannot help, the run ends here."""
        self.failures.setdefault(failure.rank, failure)
        if policy.is_retried(failure) or self.is_over:
            return
        if failure.kind == "user" and self.start == 0:  # before anything of this start was written
            raise UserError(failure.message)
        self.account.note_failure(failure)
        self.account.give_up(failure, failure.message)

    def _note_restart(self, start: int) -> None:
        if self.failures:
            self.account.note_failure(policy.root_cause(list(self.failures.values())))
        self.start = self.account.restarts = start
        self.ended, self.failures, self.has_stepped = {}, {}, False
        self.how.enter("starting")
        self.account.note("restart", {"restarts": start, "from_step": self.account.saved_step})

    def _pass_on_stop(self) -> None:
        reason = self.how.stop()
        if reason is None or self.stop_sent is not None:
            return
        if not self.has_stepped and 0 not in self.ended:  # they may take minutes more to get ready
            raise KeyboardInterrupt
        self.stop_sent = reason
        for stream in self._workers_streams():
            if stream.name == "messages":
                stream.send({"what": "stop", "reason": reason})

    def _conclude(self, status: int) -> dict[str, Any]:
        """torchrun has ended."""
        summary = self.ended.get(0)
        if summary is not None and summary.get("before_start"):
            raise KeyboardInterrupt
        if summary is not None:
            return summary
        if not self.failures:
            log = (self.folder / "torchrun.log").read_text(errors="replace").strip()
            raise RunError(f"torchrun ended with status {status} before a worker had started\n{log[-2000:]}".strip())
        failure = policy.root_cause(list(self.failures.values()))
        self.account.note_failure(failure)
        message = f"{failure.message} (worker {failure.rank} on {failure.node})"
        if self.start:
            message += f"; given up after {self.start} restarts"
        self.account.give_up(failure, message + "; failures.max_restarts says how many are borne")

    def _close(self) -> None:
        for stream in self._workers_streams():
            stream.connection.close()
        self._streams.close()
        self._listening.close()
