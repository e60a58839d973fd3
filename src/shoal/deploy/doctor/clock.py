"""Whether the kernel's clock is kept right by a time server."""

import ctypes
import errno
import os
from dataclasses import dataclass

from shoal.deploy.doctor.finding import Finding, passed, skipped

_UNSYNCHRONIZED = 0x40
_ERROR_S = 1.0
"""The kernel's own estimate of how wrong its clock may be; above this it is not to be relied on."""


class _Timex(ctypes.Structure):
    """What adjtimex(2) fills in."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    ]


@dataclass(frozen=True)
class Clock:
    """What the kernel knows of its clock."""

    is_synchronized: bool
    error_s: float
    """At most so wrong, by its own account."""


def look_at_clock() -> Clock | str:
    """What the kernel knows, or why it does not tell."""
    found = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(found)) < 0:
        number = ctypes.get_errno()
        why = "the container may not ask" if number == errno.EPERM else os.strerror(number)
        return f"the kernel does not tell ({why})"
    return Clock(not found.status & _UNSYNCHRONIZED, found.maxerror / 1e6)


def judge_clock(clock: Clock | str) -> Finding:
    """Whether it is kept right."""
    if isinstance(clock, str):
        return skipped("clock", clock)
    if not clock.is_synchronized:
        found = "no time server keeps it right, as far as the kernel knows"
        return Finding("clock", "warn", found, "start one: timedatectl set-ntp true, or chronyd on the host")
    found = f"kept right, at most {clock.error_s:.3g} s off"
    if clock.error_s > _ERROR_S:
        return Finding("clock", "warn", found, "see chronyc tracking or timedatectl timesync-status on the host")
    return passed("clock", found)
