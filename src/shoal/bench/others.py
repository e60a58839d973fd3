"""Whether others took the machine's cores while something was measured."""

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq and what another virtual machine took."""
QUIET = 0.05
"""Share of all cores' time that others may take."""
_LOOK_S = 0.5
_Measured = TypeVar("_Measured")


class Watch:
    """From here on."""

    def __init__(self) -> None:
        self._began = (time.monotonic(), _busy_s(), _own_s())

    def others(self) -> float:
        """The share of all cores' time that went to neither this process nor children of it that have ended."""
        began, busy, own = self._began
        took_s = time.monotonic() - began
        return max(0.0, (_busy_s() - busy) - (_own_s() - own)) / (max(took_s, 1e-3) * (os.cpu_count() or 1))


def quietly(measure: Callable[[], _Measured], attempts: int = 3, patience_s: float = 60.0) -> tuple[_Measured, float]:
    """What is measured while others leave the cores alone, and the share that they took.

    Begins when it is quiet, for which it waits so long. What others have disturbed is measured again, at most so often;
    then the attempt counts that was disturbed least. What was found does not matter for that.
    """
    found: list[tuple[float, _Measured]] = []
    while len(found) < attempts and (not found or found[-1][0] > QUIET):
        _wait_for_quiet(patience_s)
        watch = Watch()
        measured = measure()
        found.append((watch.others(), measured))
    share, best = min(found, key=lambda attempt: attempt[0])
    return best, share


def _wait_for_quiet(patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        watch = Watch()
        time.sleep(_LOOK_S)
        if watch.others() <= QUIET:
            return


def _busy_s() -> float:
    """Seconds that all cores have worked; 0 where the kernel does not tell."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    return sum(int(words[number]) for number in _BUSY) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Seconds that this process and its ended children have worked."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
