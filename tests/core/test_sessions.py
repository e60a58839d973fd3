import os
import subprocess
import sys
import time
from pathlib import Path

from shoal.core.sessions import in_session, kill_session
from tests.launch.processes import is_alive, wait_until_dead

FAMILY = """
import subprocess, sys, time
# As ninja starts compilers: each leads a group of its own, and has children.
subprocess.Popen(["sh", "-c", "sleep 300 & sleep 300 & wait"], process_group=0)
time.sleep(300)
"""


def start() -> "subprocess.Popen[bytes]":
    leader = subprocess.Popen([sys.executable, "-c", FAMILY], start_new_session=True)
    deadline = time.monotonic() + 20
    while len(in_session(leader.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    return leader


def test_a_session_ends_with_those_of_other_groups_even_when_its_leader_has_gone() -> None:
    leader = start()
    members = in_session(leader.pid)
    assert len(members) == 4 and len({os.getpgid(pid) for pid in members}) == 2
    leader.kill()
    while Path(f"/proc/{leader.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert len(in_session(leader.pid)) == 3, "they have outlived it"
    kill_session(leader.pid)
    wait_until_dead(*members)
    leader.wait()


def test_one_can_be_spared() -> None:
    leader = start()
    others = [pid for pid in in_session(leader.pid) if pid != leader.pid]
    kill_session(leader.pid, spare=leader.pid)
    wait_until_dead(*others)
    assert is_alive(leader.pid) and in_session(leader.pid) == [leader.pid]
    leader.kill()
    leader.wait()
