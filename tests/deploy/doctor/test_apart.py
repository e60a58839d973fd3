"""The process in which a cluster is checked: here it waits for a head that takes connections and says nothing."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.deploy.doctor import apart
from shoal.deploy.doctor.apart import check_apart
from tests.launch.processes import is_alive, wait_until_dead

SHOAL = Path(sys.executable).with_name("shoal")


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of that head."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def child_of(pid: int) -> int:
    until = time.monotonic() + 20.0
    while time.monotonic() < until:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"shoal.deploy.doctor.apart" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        time.sleep(0.05)
    raise AssertionError("it was not started")


def test_there_is_a_finding_when_it_does_not_answer(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "CONNECT_WITHIN_S", 5.0)
    told: list[str] = []
    (finding,) = check_apart(silent, None, told.append)
    assert (finding.check, finding.level, finding.group) == ("connect", "fail", "cluster")
    assert finding.found == f"no answer within 5 s, connecting to {silent}" and "ray status" in finding.advice
    assert told == [f"connecting to {silent}"]


def test_there_is_a_finding_when_it_is_ended(silent: str) -> None:
    pids: list[int] = []

    def kill(words: str) -> None:
        pids.append(child_of(os.getpid()))
        os.kill(pids[0], signal.SIGKILL)

    (finding,) = check_apart(silent, None, kill)
    assert finding.found == f"the doctor's own process has ended (status -9), connecting to {silent}"
    assert not is_alive(pids[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_who_waits_for_it(silent: str, number: signal.Signals) -> None:
    # As a terminal starts it: a shell's background jobs would ignore Ctrl-C.
    script = "import signal, os, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", script, str(SHOAL), "doctor", "--address", silent, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(1.0)  # Python is there, and has what the signal shall do
    pid = child_of(process.pid)
    time.sleep(2.0)
    process.send_signal(number)
    out, text = process.communicate(timeout=10)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    assert out == "" and "Traceback" not in text
    wait_until_dead(pid)
