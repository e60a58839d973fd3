"""The workers of a run from one start to its end: who they are and what has been heard of them."""

import signal
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from shoal.launch.account import failure_of
from shoal.launch.crew import Member
from shoal.launch.policy import Failure, Kind

CAUSE_S = 5.0
"""How long to look for the cause, where all that is known is that connections broke."""
LAST_WORDS_S = 0.5
"""How long to hear the others out where a cause is known: one of them may know a better one."""
LEAVE_S = 5.0
"""How long the others may take to end after rank 0, whose end is the run's."""


@dataclass
class Attempt:
    """One start of all workers."""

    number: int
    members: list[Member]
    started: float = field(default_factory=time.monotonic)
    looked: float = field(default_factory=time.monotonic)
    """When the launcher last looked for those that do not answer."""
    polls: dict["Future[Any]", int] = field(default_factory=dict)
    """Questions that are out, and whom they are for."""
    asked: dict[int, float] = field(default_factory=dict)
    still_s: dict[int, float] = field(default_factory=dict)
    starting_s: dict[int, float] = field(default_factory=dict)
    is_slow_start_told: bool = False
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)
    first_ended: float | None = None
    """When rank 0 did."""
    failures: dict[int, Failure] = field(default_factory=dict)
    stop_sent: str | None = None
    has_stepped: bool = False
    """Whether rank 0 has told of a step: until then there is nothing to save."""

    @property
    def is_over(self) -> bool:
        """Whether rank 0 has ended, and the others have, or have had the time to."""
        if self.first_ended is None:
            return False
        return len(self.ended) == len(self.members) or time.monotonic() - self.first_ended > LEAVE_S

    @property
    def patience_s(self) -> float:
        """How long to wait for more to be heard of a failure."""
        only_follows = all(failure.kind == "network" for failure in self.failures.values())
        return CAUSE_S if only_follows else LAST_WORDS_S

    def standing(self) -> dict[int, float]:
        """For how many seconds those that have not ended have made no progress."""
        return {rank: still_s for rank, still_s in self.still_s.items() if rank not in self.ended}

    def fail(self, rank: int, kind: Kind, message: str) -> None:
        """Note a failure that the launcher has found; a worker's first is what counts."""
        self.failures.setdefault(rank, Failure(rank, kind, message, self.members[rank].host))

    def take(self, rank: int, message: dict[str, Any]) -> bool:
        """Note how a worker ended; False if the message is about something else."""
        what = message["what"]
        if what == "ended":
            self.ended[rank] = message["summary"]
            if rank == 0:
                self.first_ended = time.monotonic()
        elif what == "failed":
            self.failures.setdefault(rank, failure_of(rank, self.members[rank].host, message))
        elif what == "died":
            self.fail(rank, "died", message["because"] or in_words(message["status"]))
        return what in ("ended", "failed", "died")


def in_words(status: int | None) -> str:
    """How a process ended."""
    if status is None:
        return "the worker's process is gone"
    if status < 0:
        hint = "; the machine may have run out of memory" if status == -signal.SIGKILL else ""
        return f"the worker's process was killed by {signal.Signals(-status).name}{hint}"
    return f"the worker's process ended with status {status} and without a word"
