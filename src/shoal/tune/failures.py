"""When a search is given up because too many of its trials have failed. A pure function."""

from collections import Counter
from collections.abc import Sequence

from shoal.tune.trial import DIVERGED, Trial

_ENOUGH = 5
"""Trials that must have shown how they do before their share counts: those after them would fail in the same way."""


def too_many_failures(trials: Sequence[Trial], num_trials: int, most: float) -> str | None:
    """Why to give up, or None.

    Of errors, the share among the trials that have trained counts, also of those that still do: errors end a trial at
    once, and what goes well takes hours. That settings diverge is what a search is there to find out, so of those the
    share among all trials that there will be does.
    """
    failed = [trial for trial in trials if trial.status == "failed"]
    broken = [trial for trial in failed if trial.kind != DIVERGED]
    shown = [trial for trial in trials if trial.is_ended or trial.results or trial.first_step_s]
    if len(shown) >= min(num_trials, _ENOUGH) and len(broken) > most * len(shown):
        found, share = broken, f"{len(broken)} of {len(shown)} trials so far failed"
    elif len(failed) > most * num_trials:
        found, share = failed, f"{len(failed)} of {num_trials} trials failed"
    else:
        return None
    reason, count = Counter(trial.reason for trial in found).most_common(1)[0]
    times = f", {count} times" if count > 1 else ""
    return f"{share}, which is more than tune.max_failed {most:g}; the most frequent reason{times}: {reason}"
