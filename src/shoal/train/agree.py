"""Stopping together: every worker must leave the loop after the same step, or the others wait for it for ever."""

import math
import time
from collections.abc import Callable

from shoal.checkpoint.saver import TROUBLE
from shoal.core.group import Group

REASONS = ("SIGINT", "SIGTERM", "SIGHUP", "preemption", "resize", TROUBLE)
"""What a run is stopped for; a checkpoint is saved whichever it is."""

_EVERY_S = 0.2
"""How often workers ask each other, about; what is longest to wait for is two steps and this."""
_MOST_CALLS = 1000


class AgreedStop:
    """`stop` of every worker as one: as soon as one has a reason, all get it, at the same call.

    Workers must call this equally often. The question is sent at one call and answered at a later one, so that nobody
    waits for the network, and it is asked every so many calls, so that short steps are not slowed by it: how many
    follows from the slowest worker's time per call, which travels with the question.
    """

    def __init__(
        self, stop: Callable[[], str | None], group: Group, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.stop = stop
        self.group = group
        self.clock = clock
        self.agreed: str | None = None
        self._calls_left = 0
        self._skipped = 0
        self._asked_at: float | None = None
        """None where nothing is known of the time that a call takes: until then the question is asked at every one."""
        self._answer: Callable[[], list[float]] | None = None
        self._is_outdated = False

    def anew(self) -> None:
        """What follows takes another time per call; every worker must say so at the same call."""
        self._calls_left, self._asked_at = 0, None
        self._is_outdated = self._answer is not None

    def __call__(self) -> str | None:
        """Why all workers stop now, or None."""
        if self.agreed is not None:
            return self.agreed
        if self._calls_left > 0:
            self._calls_left -= 1
            return None
        if self._answer is not None:
            number, seconds_per_call = self._answer()
            self._answer = None
            if number:
                self.agreed = REASONS[int(number) - 1]
                return self.agreed
            self._skipped = 0 if self._is_outdated else calls_to_skip(seconds_per_call)
            self._is_outdated = False
            if self._skipped:
                self._calls_left = self._skipped - 1
                return None
        self._ask()
        return None

    def _ask(self) -> None:
        now = self.clock()
        seconds_per_call = math.inf if self._asked_at is None else (now - self._asked_at) / (self._skipped + 1)
        self._asked_at = now
        reason = self.stop()
        number = 0 if reason is None else REASONS.index(reason) + 1
        self._answer = self.group.start_max(number, seconds_per_call)


def calls_to_skip(seconds_per_call: float) -> int:
    """How many calls pass between an answer and the next question."""
    return min(int(_EVERY_S / max(seconds_per_call, 1e-9)), _MOST_CALLS)
