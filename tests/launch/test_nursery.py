"""The warm process, with jobs that end in a moment or wait: what a trainer does is not its business."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.nursery import Nursery, _folder, new_nursery_name
from tests.launch.processes import is_alive, num_descriptors, parent_of, wait_until_dead

WRONG = {"recipe": {"tusk": "x"}}
"""A job that fails as soon as the recipe is looked at."""
WAITING = {
    "recipe": {
        "task": {"name": "image_classification"},
        "model": {"name": "mlp"},
        "data": {"name": "digits"},
        "train": {"steps": 1},
        "cluster": {"gpus_per_worker": 0},
    },
    "meeting": {"rank": 1, "world_size": 2, "host": "127.0.0.1", "port": 9, "timeout_s": 600},
    "local_rank": 0,
}
"""A job that waits for a worker that never comes."""


class Child:
    """A child, and what it sends and prints."""

    def __init__(self, nursery: Nursery, job: dict[str, Any]) -> None:
        job = {"environment": dict(os.environ), "paths": [], "directory": "/", "started": 0.0, "marks": {}} | job
        self.nursery = nursery
        self._channel, theirs = socket.socketpair()
        self._out, writer = os.pipe()
        stacks = os.memfd_create("stacks")
        try:
            self.pid = nursery.fork(job, theirs.fileno(), writer, writer, stacks)
        finally:
            theirs.close()
            os.close(writer)
            os.close(stacks)

    def status(self, timeout_s: float = 30.0) -> int | None:
        """How it ended, if it does in time."""
        while select.select([self.nursery], [], [], timeout_s)[0]:
            if (status := self.nursery.ended(self.pid)) is not None:
                return status
        return None

    def close(self) -> tuple[list[dict[str, Any]], str]:
        """All that it has sent and printed, when it has ended."""
        with self._channel.makefile() as said, os.fdopen(self._out) as printed:
            found = [json.loads(line) for line in said], printed.read()
        self._channel.close()
        return found


@pytest.fixture(scope="module")
def warm() -> Iterator[Nursery]:
    """One for all tests that do not break it: it takes seconds to be warm."""
    nursery = Nursery(new_nursery_name())
    yield nursery
    nursery.close()


@pytest.fixture
def own() -> Iterator[Nursery]:
    nursery = Nursery(new_nursery_name())
    yield nursery
    nursery.close()


def test_a_child_runs_its_job_and_its_status_is_told(warm: Nursery) -> None:
    for _ in range(2):
        child = Child(warm, WRONG)
        assert child.status() == 1
        messages, printed = child.close()
        assert [message["what"] for message in messages] == ["failed"]
        assert messages[0]["kind"] == "user" and "tusk: unknown key" in messages[0]["message"]
        assert printed == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_child_that_a_signal_ended_is_told_as_such(warm: Nursery, number: signal.Signals) -> None:
    child = Child(warm, WAITING)
    assert child.status(timeout_s=0.2) is None
    os.kill(child.pid, number)
    assert child.status() == -number
    child.close()


def test_a_child_leads_a_group_of_its_own_by_the_time_it_is_known(warm: Nursery) -> None:
    for _ in range(5):
        child = Child(warm, WAITING)
        assert os.getpgid(child.pid) == child.pid
        os.killpg(child.pid, signal.SIGKILL)
        assert child.status() == -signal.SIGKILL
        child.close()


def test_a_job_may_be_of_any_size(warm: Nursery) -> None:
    child = Child(warm, {"recipe": {"tusk": "x" * 5_000_000}})
    assert child.status() == 1
    messages, _ = child.close()
    assert "tusk: unknown key" in messages[0]["message"]


@pytest.mark.slow
def test_fifty_children_leave_no_descriptors_behind(warm: Nursery) -> None:
    first = Child(warm, WAITING)
    nursery = parent_of(first.pid)
    before = num_descriptors(nursery), num_descriptors(os.getpid())
    for _ in range(50):
        child = Child(warm, WRONG)
        assert child.status() == 1
        child.close()
    assert (num_descriptors(nursery), num_descriptors(os.getpid())) == before
    os.kill(first.pid, signal.SIGKILL)
    first.status()
    first.close()


def test_the_children_of_an_owner_go_with_it_and_the_nursery_with_the_last_one(own: Nursery) -> None:
    other = Nursery(own.name)
    mine, theirs = Child(own, WAITING), Child(other, WAITING)
    nursery = parent_of(mine.pid)
    assert parent_of(theirs.pid) == nursery, "one a machine is enough"
    # What is sent to every process of a job is not for it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(nursery, number)
    other.close()
    wait_until_dead(theirs.pid)
    theirs.close()
    assert is_alive(mine.pid) and is_alive(nursery)
    assert mine.status(timeout_s=0.1) is None
    own.close()
    wait_until_dead(mine.pid, nursery)
    mine.close()
    assert list(_folder().glob(f"{own.name}*")) == []


def test_when_the_nursery_is_killed_its_children_die_and_another_can_take_its_place(own: Nursery) -> None:
    child = Child(own, WAITING)
    nursery = parent_of(child.pid)
    os.kill(nursery, signal.SIGKILL)
    wait_until_dead(child.pid)
    child.close()
    with pytest.raises(ConnectionError):
        own.ended(child.pid)
    with pytest.raises(ConnectionError):
        Child(own, WRONG)
    again = Nursery(own.name)
    child = Child(again, WRONG)
    assert child.status() == 1
    child.close()
    again.close()


OWNER = """
import os, socket, sys, time
from shoal.launch.nursery import Nursery
from tests.launch.test_nursery import Child, WAITING
nursery = Nursery("of-a-killed-owner-%d" % os.getpid())
print(Child(nursery, WAITING).pid, flush=True)
time.sleep(600)
"""


def test_when_the_owner_is_killed_everything_goes() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    nursery = parent_of(child)
    assert is_alive(child) and nursery != owner.pid
    owner.kill()
    owner.communicate()
    wait_until_dead(child, nursery)
    assert list(_folder().glob(f"of-a-killed-owner-{owner.pid}*")) == []


def test_an_owner_that_waits_for_an_answer_can_be_woken(own: Nursery) -> None:
    """Right after the start: the nursery is still importing."""
    import threading

    failed: list[str] = []

    def ask() -> None:
        try:
            Child(own, WRONG)
        except ConnectionError as error:
            failed.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    own.end()
    thread.join(timeout=5.0)
    assert failed == ["the process that trainers are forked from is gone"]


def test_nurseries_listen_where_nobody_else_can_look(own: Nursery) -> None:
    assert _folder().stat().st_mode & 0o777 == 0o700
    (file,) = _folder().glob(f"{own.name}*")
    assert file.is_socket()


@pytest.mark.slow
def test_the_folder_for_temporary_files_may_be_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    nursery, other = Nursery("name"), Nursery("name")
    child = Child(other, WRONG)
    assert child.status() == 1
    child.close()
    nursery.close()
    other.close()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path
    monkeypatch.setattr("tempfile.tempdir", str(root))
    (root / f"shoal-{os.getuid()}").mkdir()
    (root / f"shoal-{os.getuid()}").chmod(0o755)
    with pytest.raises(PermissionError, match="open to others") as caught:
        Nursery("x")
    assert caught.value.filename == str(root / f"shoal-{os.getuid()}"), "the command tells it by that"
