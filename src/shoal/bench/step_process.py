"""The processes of the contenders, as whoever measures sees them: each lives through the whole measurement."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.bench.commands import started
from shoal.bench.data_peers import short_place
from shoal.bench.step_worker import JOB, SOCKET
from shoal.core.errors import RunError, UserError
from shoal.launch.job import own_paths

_STARTS_WITHIN_S = 600.0
_ANSWERS_WITHIN_S = 3600.0
_LOOK_EVERY_S = 0.2
_OWN_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""What is compiled, each contender compiles by itself."""


class LeftOutError(RunError):
    """A contender that cannot go on, and why."""


class Running:
    """One contender's process."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", folder: Path, listener: socket.socket) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self._process = process
        self._folder = folder
        self._listener = listener
        self._socket: socket.socket | None = None
        self._heard = b""

    def wait_until_built(self) -> None:
        """Until it could train."""
        deadline = time.monotonic() + _STARTS_WITHIN_S
        self._listener.settimeout(_LOOK_EVERY_S)
        while self._socket is None:
            with contextlib.suppress(TimeoutError):
                self._socket, _ = self._listener.accept()
            if self._socket is None and (self._process.poll() is not None or time.monotonic() > deadline):
                raise self._gone("started")
        self._socket.settimeout(_LOOK_EVERY_S)
        self.facts = self._hear(_STARTS_WITHIN_S)["ready"]

    def ask(self, **command: Any) -> dict[str, Any]:
        """Have it do something, and wait until it has."""
        assert self._socket is not None
        with contextlib.suppress(OSError):  # what is the matter shows when it is listened to
            self._socket.sendall(json.dumps(command).encode() + b"\n")
        return self._hear(_ANSWERS_WITHIN_S)

    def close(self) -> None:
        """There will be no more turns."""
        if self._socket is not None:
            self._socket.close()
        self._listener.close()

    def _hear(self, limit_s: float) -> dict[str, Any]:
        assert self._socket is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._heard:
            try:
                piece = self._socket.recv(1 << 16)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise self._gone(f"answered within {limit_s:.0f} s") from None
                continue
            except OSError:
                piece = b""
            if not piece:
                raise self._gone("gone on")
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            if answer["is_refused"]:
                raise UserError(answer["failed"])
            raise LeftOutError(f"failed: {answer['failed']}")
        return answer

    def _gone(self, what: str) -> LeftOutError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        log = (self._folder / "log").read_text(errors="replace").strip().splitlines()[-3:]
        return LeftOutError("; ".join([f"has not {what} (status {self._process.poll()})", *log]))


@contextlib.contextmanager
def running(name: str, job: Mapping[str, Any], cache: Path | None) -> Iterator[Running]:
    """A contender's process, which ends with this.

    `cache`: where what it compiles is kept; None: nowhere.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-", dir=short_place(), ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        kept = folder if cache is None else cache.absolute() / name
        environment = {variable: str(kept / sub) for variable, sub in _OWN_CACHES.items()}
        file = folder / JOB
        file.touch(mode=0o600)  # a recipe may hold what came from the environment
        told = {"contender": name, "paths": own_paths(), "parent": os.getpid()}
        file.write_text(json.dumps({**job, **told}), encoding="utf-8")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / SOCKET))
        listener.listen(1)
        command = [sys.executable, "-P", "-m", "shoal.bench.step_worker", str(folder)]
        with started(command, folder / "log", environment) as process:
            one = Running(name, process, folder, listener)
            try:
                yield one
            finally:
                one.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_ends_within(name))


def _ends_within(name: str) -> float:
    """Seconds that it may take to end by itself: a Ray of its own has to be wound up."""
    return 20.0 if name == "shoal_ray" else 5.0
