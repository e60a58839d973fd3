"""What a worker noticed of its data: what could not be read, what had to be fetched."""

import threading
from dataclasses import dataclass, field

from shoal.data.bad_samples import BadSample

MOST_NAMED = 10
"""Samples that could not be read which are named; the others are only counted."""


@dataclass
class DataStatistics:
    """Counts since the start of a run. Several threads add to them."""

    skipped: int = 0
    """How often a sample could not be read, over all epochs."""
    named: list[BadSample] = field(default_factory=list)
    """The first of these samples, each once."""
    files_at_hand: int = 0
    """Files in a store that were found in the cache."""
    files_fetched: int = 0
    bytes_fetched: int = 0
    retries: int = 0
    """Attempts to fetch a file that failed."""
    workers: int = 0
    """Processes that read for this one."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def skip(self, bad: list[BadSample]) -> None:
        """These were left out or replaced."""
        self.skipped += len(bad)
        for sample in bad:
            if len(self.named) < MOST_NAMED and sample not in self.named:
                self.named.append(sample)

    def add(self, **counts: int) -> None:
        """Add to the counts of files."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def counts(self) -> dict[str, int]:
        """All of them by name."""
        names = ("skipped", "files_at_hand", "files_fetched", "bytes_fetched", "retries", "workers")
        return {name: getattr(self, name) for name in names}
