"""The agent of one worker: runs a trainer in a fork of the machine's warm process, and tells what happens to it.

An agent lives where its trainer does: in the launcher for workers on this machine, in a Ray actor on a cluster. When a
trainer dies the agent stays, so the next one starts at once.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from shoal.core.sessions import kill_session
from shoal.launch.environment import network_environment
from shoal.launch.lines import LONGEST_PRINT, Lines
from shoal.launch.nursery import Nursery

LEASE_S = 30.0
"""A trainer whose launcher has not asked for so long is ended: where a machine was cut off, another has its place."""
_STACKS_WITHIN_S = 2.0
_KILLED_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.5
_GATHER_S = 0.02
"""What follows news within so long is told with it: short steps must not keep the launcher busy."""


class Agent:
    """One worker's place. Methods may be called from several threads."""

    def __init__(self, nursery: str, lease_s: float | None = LEASE_S) -> None:
        """`lease_s`: None where the launcher's end is this agent's too."""
        self._nursery = Nursery(nursery)
        self._trainer: _Trainer | None = None
        self._listening: socket.socket | None = None
        self._asked = time.monotonic()
        self._closed = threading.Event()
        self._changing = threading.Lock()
        if lease_s is not None:
            threading.Thread(target=self._watch_lease, args=(lease_s,), name="lease", daemon=True).start()

    def facts(self) -> dict[str, Any]:
        """Where this is."""
        return {"pid": os.getpid(), "host": socket.gethostname()}

    def open_port(self, host: str) -> int:
        """Listen at `host`, where the workers of the next start will meet; the trainer of rank 0 takes it over."""
        with self._changing:
            self._close_port()
            self._listening = socket.create_server((host, 0), backlog=4096)
            return int(self._listening.getsockname()[1])

    def start(self, job: dict[str, Any]) -> int:
        """Start a trainer; its pid. One that is left from before is ended first."""
        with self._changing:
            self._end_trainer()
            # All of this place's own, because the warm process may have been started by another: its GPU, above all.
            environment = dict(os.environ) | network_environment(job["address"], job["environment"])
            job = job | {"environment": environment, "agent_pid": os.getpid()}
            listening = self._listening if job["meeting"]["rank"] == 0 else None
            try:
                self._trainer = _Trainer(self._nursery, job, listening)
            except ConnectionError:  # the warm process was killed
                if self._closed.is_set():
                    raise
                self._nursery.close()
                self._nursery = Nursery(self._nursery.name)
                self._trainer = _Trainer(self._nursery, job, listening)
            finally:
                self._close_port()
            self._asked = time.monotonic()
            return self._trainer.pid

    def poll(self, attempt: int, timeout_s: float) -> dict[str, Any]:
        """What the trainer of that start has said since the last call, as soon as there is something, and for how many
        seconds it has stood, or has been getting ready. Of another start nothing is told: the launcher may ask late."""
        self._asked = time.monotonic()
        trainer = self._trainer
        if trainer is None or trainer.attempt != attempt:
            return {"messages": [{"what": "died", "status": None, "because": None}], "still_s": 0.0, "starting_s": 0.0}
        return {
            "messages": trainer.take(timeout_s),
            "still_s": trainer.still_s,
            "starting_s": trainer.starting_s,
        }

    def stop(self, attempt: int, reason: str) -> None:
        """Ask the trainer of that start to save and end."""
        trainer = self._trainer
        if trainer is not None and trainer.attempt == attempt:
            trainer.send({"what": "stop", "reason": reason})

    def stacks(self) -> str:
        """Where every thread of the trainer is now."""
        trainer = self._trainer
        return trainer.stacks() if trainer is not None else "no trainer"

    def kill(self) -> None:
        """End the trainer at once."""
        with self._changing:
            self._end_trainer()

    def close(self) -> None:
        """End the trainer, and the warm process if nobody else has a use for it."""
        self._closed.set()
        self._nursery.end()  # wakes a start that waits for it
        with self._changing:
            try:
                self._end_trainer()
            finally:
                self._close_port()
                self._nursery.close()

    def _end_trainer(self) -> None:
        if self._trainer is not None:
            self._trainer.end()
            self._trainer = None

    def _close_port(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def _watch_lease(self, lease_s: float) -> None:
        while not self._closed.wait(min(1.0, lease_s / 4)):
            trainer = self._trainer
            if trainer is not None and time.monotonic() - self._asked > lease_s:
                trainer.kill(f"the worker was ended because nobody had asked for it for {lease_s:g} s")


class _Trainer:
    """A trainer that runs, and the one thread that follows it: its messages, its prints and its end, in their order."""

    def __init__(self, nursery: Nursery, job: dict[str, Any], listening: socket.socket | None) -> None:
        self.attempt: int = job["starts"]
        self.starting_s = 0.0
        """Seconds in which it has been getting ready; none any more when it has."""
        self.still_s = 0.0
        """Seconds since it last made a step or a batch of an evaluation; while it gets ready, which may be a long
        download, only those in which its process is stopped. When the agent itself stands still, none count."""
        self._nursery = nursery
        self._messages: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._has_moved = self._has_spoken = self._is_over = False
        self._killed_because: str | None = None
        self._stacks = os.memfd_create("stacks")
        self._channel, theirs = socket.socketpair()
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        given = [theirs.fileno(), *writers, self._stacks] + ([listening.fileno()] if listening else [])
        try:
            self.pid = nursery.fork(job, *given)
        except BaseException:
            for descriptor in (*readers, self._stacks):
                os.close(descriptor)
            self._channel.close()
            raise
        finally:
            theirs.close()
            for descriptor in writers:
                os.close(descriptor)
        for reader in readers:
            os.set_blocking(reader, False)
        self._prints = {"stdout": Lines(readers[0], LONGEST_PRINT), "stderr": Lines(readers[1], LONGEST_PRINT)}
        self._said = Lines(self._channel.fileno())
        self._thread = threading.Thread(target=self._follow, name="trainer", daemon=True)
        self._thread.start()

    def take(self, timeout_s: float) -> list[dict[str, Any]]:
        """Its messages since the last call, as soon as there are any."""
        with self._news:
            is_news = self._news.wait_for(lambda: self._messages, timeout_s)
        if is_news:
            time.sleep(_GATHER_S)
        with self._news:
            messages, self._messages = self._messages, []
        return messages

    def send(self, message: dict[str, Any]) -> None:
        """An order; whether it has ended meanwhile, others tell."""
        with contextlib.suppress(OSError):
            self._channel.sendall((json.dumps(message) + "\n").encode())

    def kill(self, because: str | None = None) -> None:
        """With everything that it has started; `because` is told as the cause."""
        if not self._is_over:  # its number may be another's by then
            self._killed_because = self._killed_because or because
            kill_session(self.pid)

    def end(self) -> None:
        """Kill it and let go."""
        self.kill()
        self._thread.join(timeout=_KILLED_WITHIN_S)
        if self._thread.is_alive():
            raise TimeoutError(f"process {self.pid} does not end, although it was killed")
        os.close(self._stacks)

    def stacks(self) -> str:
        """Of every thread, or why they cannot be had."""
        try:
            state = self._state()
            if state in "Tt":
                return f"process {self.pid} is stopped (state {state}): somebody sent it SIGSTOP or debugs it"
            if not self._catches(signal.SIGUSR1):  # which would end it
                return f"process {self.pid} (state {state}) no longer tells where it is: it has given up SIGUSR1"
            before = written = os.fstat(self._stacks).st_size
            os.kill(self.pid, signal.SIGUSR1)
            deadline = time.monotonic() + _STACKS_WITHIN_S
            while time.monotonic() < deadline:
                time.sleep(0.1)
                size, written = written, os.fstat(self._stacks).st_size
                if before < size == written:  # and no more is coming
                    return os.pread(self._stacks, size - before, before).decode(errors="replace")
        except OSError as error:
            return f"the stacks of process {self.pid} cannot be had: {error}"
        return f"process {self.pid} (state {state}) did not write its stacks"

    def _catches(self, number: int) -> bool:
        """Whether it has a handler for a signal."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (number - 1) & 1)

    def _state(self) -> str:
        """As `ps` shows it: T is stopped by a signal, t by a debugger, X has gone."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "X"

    def _follow(self) -> None:
        status = None
        with selectors.DefaultSelector() as selector:
            sources: list[Nursery | Lines] = [self._nursery, self._said, *self._prints.values()]
            for source in sources:
                selector.register(source, selectors.EVENT_READ)
            try:
                while status is None:
                    ready = self._listen(selector, _LOOK_EVERY_S)
                    if self._nursery in ready:
                        status = self._nursery.ended(self.pid)
            except OSError:
                # The trainer goes with the warm process, but not what the trainer has started.
                self.kill("the process that the worker was forked from is gone")
            self._is_over = True
            selector.unregister(self._nursery)
            while self._listen(selector, 0.0):
                pass
        self._tell([_print(name, line) for name, lines in self._prints.items() for line in lines.rest()])
        for lines in self._prints.values():
            os.close(lines.fileno())
        self._channel.close()
        if not self._has_spoken:
            self._tell([{"what": "died", "status": status, "because": self._killed_because}])

    def _listen(self, selector: selectors.BaseSelector, timeout_s: float) -> list[Any]:
        """Pass on what there is, waiting for it if need be; where there was something."""
        began = time.monotonic()
        ready = [key.fileobj for key, _ in selector.select(timeout_s)]
        passed_s = min(time.monotonic() - began, 2 * _LOOK_EVERY_S)
        if self._has_moved or self._state() in "Tt":
            self.still_s += passed_s
        else:
            self.starting_s += passed_s
        # Messages are read before prints and told after them: what was printed before a message comes before it.
        said = [json.loads(line) for line in (self._said.read() if self._said in ready else [])]
        printed = [_print(name, line) for name, lines in self._prints.items() for line in lines.read()]
        if any(message["what"] == "beat" for message in said):
            self._has_moved, self.still_s, self.starting_s = True, 0.0, 0.0
        if any(message["what"] in ("ended", "failed") for message in said):
            self._has_spoken = True  # nobody asks after that, so a line without an end is told now
            printed += [_print(name, line) for name, lines in self._prints.items() for line in lines.rest()]
        self._tell(printed + [message for message in said if message["what"] != "beat"])
        for lines in (self._said, *self._prints.values()):
            if lines in ready and not lines.is_open:
                selector.unregister(lines)
        return ready

    def _tell(self, messages: list[dict[str, Any]]) -> None:
        if messages:
            with self._news:
                self._messages += messages
                self._news.notify_all()


def _print(stream: str, line: str) -> dict[str, Any]:
    return {"what": "print", "stream": stream, "line": line}
