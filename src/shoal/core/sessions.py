"""Processes that end together: one with who started it, and with everything that it has started itself.

A process group is not enough: build tools put every compiler into a group of its own. All of them stay in the session
of whoever leads it, even when their parents are gone.
"""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when the process that started this one ends; if it has ended already, nothing comes any more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def in_session(leader: int) -> list[int]:
    """The processes of a session that still run."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            stat = Path(entry.path, "stat").read_text()
        except OSError:  # it has ended meanwhile
            continue
        state, _parent, _group, session = stat.rpartition(")")[2].split()[:4]
        if int(session) == leader and state not in "ZX":
            found.append(int(entry.name))
    return found


def kill_session(leader: int, spare: int | None = None) -> None:
    """Kill every process of a session, but for `spare`, and those that they have started meanwhile.

    The leader must not have been waited for, or the session be known to live: else its number may be another's.
    """
    killed = {spare}
    while new := [pid for pid in in_session(leader) if pid not in killed]:
        killed.update(new)
        for pid in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # ended meanwhile; a program of another user
                os.kill(pid, signal.SIGKILL)
