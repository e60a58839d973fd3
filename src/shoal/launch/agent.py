"""The agent of one worker: keeps a warm process, runs a trainer in a fork of it, and tells the launcher what happens.

An agent lives where its trainer does: in the launcher for workers on this machine, in a Ray actor on a cluster. When a
trainer dies the agent stays, so the next one starts at once.
"""

import contextlib
import json
import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from shoal.launch.environment import network_environment
from shoal.launch.nursery import Nursery

_LEASE_S = 30.0
"""A trainer whose launcher has not asked for so long is ended: where a machine was cut off, another has its place."""
_LONGEST_LINE = 10_000
_STACKS_WITHIN_S = 2.0


class Agent:
    """One worker's place. Methods may be called from several threads."""

    def __init__(self, nursery: str) -> None:
        self._nursery = Nursery(nursery)
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-agent-")
        self._messages: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._trainer: _Trainer | None = None
        self._listening: socket.socket | None = None
        self._asked = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._watch_lease, name="lease", daemon=True).start()

    def facts(self) -> dict[str, Any]:
        """Where this is."""
        return {"pid": os.getpid(), "host": socket.gethostname()}

    def open_port(self, host: str) -> int:
        """Listen at `host`, where the workers of the next start will meet; the trainer of rank 0 takes it over."""
        self._close_port()
        self._listening = socket.create_server((host, 0), backlog=4096)
        return int(self._listening.getsockname()[1])

    def start(self, job: dict[str, Any]) -> int:
        """Start a trainer; its pid. One that is left from before is ended first."""
        self.kill()
        # All of this place's own, because the warm process may have been started by another: its GPU, above all.
        environment = dict(os.environ) | network_environment(job["address"], job["environment"])
        job = job | {"stacks": str(Path(self._folder.name) / "stacks"), "environment": environment}
        is_first = job["meeting"]["rank"] == 0
        try:
            self._trainer = _Trainer(self, self._nursery, job, self._listening if is_first else None)
        except (ConnectionError, BrokenPipeError):  # the warm process was killed
            self._nursery.close()
            self._nursery = Nursery(self._nursery.name)
            self._trainer = _Trainer(self, self._nursery, job, self._listening if is_first else None)
        finally:
            self._close_port()
        self._asked = time.monotonic()
        return self._trainer.pid

    def poll(self, timeout_s: float) -> dict[str, Any]:
        """What the trainer has said since the last call, as soon as there is something, and how long it has stood."""
        self._asked = time.monotonic()
        with self._news:
            if not self._messages:
                self._news.wait(timeout_s)
            messages, self._messages = self._messages, []
        trainer = self._trainer
        return {"messages": messages, "still_s": trainer.still_s() if trainer is not None else 0.0}

    def tell(self, message: dict[str, Any]) -> None:
        """For the launcher."""
        with self._news:
            self._messages.append(message)
            self._news.notify_all()

    def stop(self, reason: str) -> None:
        """Ask the trainer to save and end."""
        if self._trainer is not None:
            self._trainer.send({"what": "stop", "reason": reason})

    def stacks(self) -> str:
        """Where every thread of the trainer is now."""
        return self._trainer.stacks() if self._trainer is not None else "no trainer"

    def kill(self) -> None:
        """End the trainer at once."""
        if self._trainer is not None:
            self._trainer.kill()
            self._trainer = None
        with self._news:
            self._messages.clear()

    def close(self) -> None:
        """End the trainer and the warm process."""
        self._closed.set()
        self.kill()
        self._close_port()
        self._nursery.close()
        self._folder.cleanup()

    def _close_port(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def _watch_lease(self) -> None:
        while not self._closed.wait(1.0):
            trainer = self._trainer
            if trainer is not None and time.monotonic() - self._asked > _LEASE_S:
                trainer.kill()


class _Trainer:
    """A trainer that runs."""

    def __init__(self, agent: Agent, nursery: Nursery, job: dict[str, Any], listening: socket.socket | None) -> None:
        self.agent = agent
        self.nursery = nursery
        self.attempt = job["starts"]
        self.stacks_file = Path(job["stacks"])
        self.moved_at: float | None = None
        """When it last made a step or a batch of an evaluation; None before the first."""
        self.is_killed = False
        ours, theirs = socket.socketpair()
        out_reader, out_writer = os.pipe()
        err_reader, err_writer = os.pipe()
        given = [theirs.fileno(), out_writer, err_writer] + ([listening.fileno()] if listening else [])
        try:
            self.pid = nursery.fork(job, *given)
        except BaseException:
            for descriptor in (out_reader, err_reader):
                os.close(descriptor)
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(out_writer)
            os.close(err_writer)
        self._socket = ours
        self._printing = [
            threading.Thread(target=self._pass_on, args=(reader, stream), daemon=True)
            for reader, stream in ((out_reader, "stdout"), (err_reader, "stderr"))
        ]
        self._listening = threading.Thread(target=self._listen, name="trainer", daemon=True)
        for thread in (*self._printing, self._listening):
            thread.start()

    def still_s(self) -> float:
        """Seconds since the last sign of progress; none before the first step, which may compile for long."""
        return 0.0 if self.moved_at is None else time.monotonic() - self.moved_at

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended; that is told by `_listen`
            self._socket.sendall((json.dumps(message) + "\n").encode())

    def kill(self) -> None:
        self.is_killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._listening.join(timeout=10.0)
        for thread in self._printing:
            thread.join(timeout=1.0)

    def stacks(self) -> str:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in "Tt":
                return f"the process {self.pid} is stopped (state {state}): somebody sent it SIGSTOP or debugs it"
            size = self.stacks_file.stat().st_size
            os.kill(self.pid, signal.SIGUSR1)
            deadline = time.monotonic() + _STACKS_WITHIN_S
            while time.monotonic() < deadline:
                time.sleep(0.1)
                if self.stacks_file.stat().st_size > size:
                    time.sleep(0.2)
                    return self.stacks_file.read_text()[size:]
        except OSError as error:
            return f"the stacks of process {self.pid} cannot be had: {error}"
        return f"the process {self.pid} (state {state}) did not write its stacks"

    def _listen(self) -> None:
        ended = False
        with contextlib.suppress(OSError), self._socket.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                if message["what"] == "beat":
                    self.moved_at = time.monotonic()
                    continue
                ended = ended or message["what"] in ("ended", "failed")
                self._tell(message)
        try:
            status = self.nursery.wait(self.pid, 5.0)
        except (ConnectionError, OSError):
            status = None
        for thread in self._printing:
            thread.join(timeout=1.0)
        self._socket.close()
        if not ended:
            self._tell({"what": "died", "status": status})

    def _pass_on(self, descriptor: int, stream: str) -> None:
        with os.fdopen(descriptor, "r", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._tell({"what": "print", "stream": stream, "line": line.rstrip("\n")[:_LONGEST_LINE]})

    def _tell(self, message: dict[str, Any]) -> None:
        if not self.is_killed:
            self.agent.tell(message | {"attempt": self.attempt})
