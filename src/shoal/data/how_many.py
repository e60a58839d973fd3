"""How many processes should read: found out by reading. A pure policy over the seconds that steps take."""

import math

_SKIPPED = 2
"""Steps after a change that tell nothing: caches are cold, processes start."""
_STEPS, _SECONDS = 5, 0.3
"""What is measured before anything is changed: at least so many steps and so many seconds."""
_BORNE = 0.05
"""Share of the time that may go into waiting for data."""
_SHORT_S = 0.0005
"""A step whose data is read faster than this would not be faster by a process, which costs as much to talk to."""
_MORE = 1.25
"""More readers than would just do."""


class HowMany:
    """Told how long each step waited for its data and how long it computed, says when another number would be better.

    It begins in line, so that the first step comes as soon as it can, and goes on from what that takes. More only ever:
    a step that is longer for a while would have readers come and go.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._begin()

    def _begin(self) -> None:
        self._seen, self._read_s, self._compute_s = 0, 0.0, 0.0

    def note(self, read_s: float, compute_s: float) -> int | None:
        """Another number to go on with from the next step on, or None."""
        if self.count >= self.most:
            return None
        self._seen += 1
        if self._seen <= _SKIPPED + self.count:  # each process begins with a batch of its own
            return None
        self._read_s += read_s
        self._compute_s += compute_s
        steps = self._seen - _SKIPPED - self.count
        total_s = self._read_s + self._compute_s
        if steps < _STEPS or total_s < _SECONDS:
            return None
        found = self._better(steps, total_s)
        self._begin()
        if found is not None:
            self.count = found
        return found

    def _better(self, steps: int, total_s: float) -> int | None:
        if self._read_s < _BORNE * total_s or self._read_s < _SHORT_S * steps:
            return None
        if self.count:
            return min(self.most, 2 * self.count)
        wanted = math.ceil(_MORE * self._read_s / max(self._compute_s, 1e-9))
        return max(1, min(self.most, wanted))
