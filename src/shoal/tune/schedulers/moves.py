"""What a scheduler decides."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.tune.space import Config
from shoal.tune.trial import Trial

Trials = Mapping[int, Trial]


@dataclass(frozen=True)
class Go:
    """A trial that is paused goes on."""

    trial: int


@dataclass(frozen=True)
class Stop:
    """A trial that is paused ends."""

    trial: int
    reason: str


@dataclass(frozen=True)
class Exploit:
    """A trial takes over the weights of another, with settings of its own."""

    trial: int
    donor: int
    progress: float
    config: Config


Move = Go | Stop | Exploit


def at(progress: float, unit: str) -> str:
    """`at epoch 3`, or `at step 300`."""
    return f"at {unit.removesuffix('s')} {progress:g}"


class Scheduler(Protocol):
    """Compares trials at equal progress."""

    def until(self, trial: Trial) -> float | None:
        """Where a trial that starts now is to pause; None: it runs to its end."""
        ...

    def verdict(self, trial: Trial, trials: Trials) -> str | None:
        """Why to stop a trial that runs, asked after each of its results; None: it goes on."""
        ...

    def moves(self, trials: Trials, expects_more: bool) -> list[Move]:
        """What becomes of trials that are paused; `expects_more`: whether others will still be proposed."""
        ...
