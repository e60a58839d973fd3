"""Every trial runs to its end."""

from shoal.tune.schedulers.moves import Move, Trials
from shoal.tune.trial import Trial


class ToTheEnd:
    """As `Scheduler`."""

    def until(self, trial: Trial) -> float | None:
        """Nowhere."""
        return None

    def verdict(self, trial: Trial, trials: Trials) -> str | None:
        """Never."""
        return None

    def moves(self, trials: Trials, expects_more: bool) -> list[Move]:
        """None is paused."""
        return []
