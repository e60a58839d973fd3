"""The hands of a drill: whom they reach, what they do to it, and what they leave alone."""

import contextlib
import errno
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.bench.drill_run import OverError
from shoal.bench.drill_victim import Victim, held, on_this_machine
from shoal.core.errors import RunError, UserError

WRITER = """
import sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True)
for line in sys.stdin:
    try:
        with open(sys.argv[1], "ab", buffering=0) as file:
            print(file.write(b"x" * int(line)), flush=True)
    except OSError as error:
        print(-error.errno, flush=True)
"""
"""Appends as many bytes to a file as it is told to, and says how many were taken, or why none were."""


class Writer:
    """Such a process, held as the worker that it is not."""

    def __init__(self, process: "subprocess.Popen[str]", victim: Victim) -> None:
        self.process = process
        self.victim = victim

    def append(self, num_bytes: int) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(num_bytes, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file"), "shoal"]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdin=-1, stdout=-1, text=True))
        stack.callback(process.kill)
        assert process.stdout is not None
        process.stdout.readline()
        yield Writer(process, stack.enter_context(held({"rank": 1, "pid": process.pid}))[0])


def test_a_process_that_is_no_worker_is_left_alone() -> None:
    other = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RunError, match=f"process {other.pid} on this machine is no worker"):
            held({"rank": 1, "pid": other.pid}).__enter__()
        assert other.poll() is None
        other.communicate(b"\n")
        assert other.returncode == 0
    with pytest.raises(OverError, match="the process of worker 1 had ended"):
        held({"rank": 1, "pid": other.pid}).__enter__()


def test_workers_of_other_machines_are_out_of_reach() -> None:
    here, there = {"rank": 0, "host": socket.gethostname()}, {"rank": 1, "host": "elsewhere"}
    assert on_this_machine([there, here]) == [here]
    with pytest.raises(UserError, match=r"--address: the workers run on elsewhere, .* start the drill there"):
        on_this_machine([there])


def test_files_stay_short_until_the_limit_is_lifted(writer: Writer) -> None:
    assert writer.append(1500) == 1500
    with writer.victim.files_up_to(2000):
        assert writer.append(1000) == 500, "the rest has no room"
        assert writer.append(1) == -errno.EFBIG
        assert writer.process.poll() is None, "it was killed for it"
    assert writer.append(5000) == 5000


def test_the_limit_is_lifted_where_something_goes_wrong_meanwhile(writer: Writer) -> None:
    with pytest.raises(TimeoutError), writer.victim.files_up_to(10):
        raise TimeoutError
    assert writer.append(5000) == 5000


def test_one_that_has_ended_cannot_be_limited_and_need_not_be_freed(writer: Writer) -> None:
    with writer.victim.files_up_to(10):
        writer.process.kill()
        writer.process.wait()
    with pytest.raises(OverError, match="the process of worker 1 had ended"), writer.victim.files_up_to(10):
        pass


def test_one_that_is_stopped_stands_with_all_its_threads(writer: Writer) -> None:
    with held({"rank": 1, "pid": writer.process.pid}) as [victim]:
        victim.stop()
        stats = [path.read_text() for path in Path(f"/proc/{victim.pid}/task").glob("*/stat")]
        assert [stat.rpartition(")")[2].split()[0] for stat in stats] == ["T", "T"]
    assert writer.append(3) == 3, "whoever is let go of runs again"


def test_stopping_one_that_has_ended_does_not_wait_for_it(writer: Writer) -> None:
    writer.process.kill()
    writer.process.wait()
    writer.victim.stop()
