"""What every sink does, whichever it is."""

from typing import Protocol

from shoal.observe.track.facts import Facts
from shoal.observe.track.points import Point


class Sink(Protocol):
    """Somewhere that keeps a copy of a run. Any method may raise: it is then called again later, with the same."""

    keeps_at_once: bool
    """Whether what `log` was given is safe when it returns; else only when `end` does."""

    def tell(self, facts: Facts) -> None:
        """What is known of the run; the first call, and again whenever that has changed."""
        ...

    def log(self, points: list[Point]) -> None:
        """New values, in the order of their steps."""
        ...

    def end(self, facts: Facts) -> None:
        """All values were given, and the run has ended or stopped."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
