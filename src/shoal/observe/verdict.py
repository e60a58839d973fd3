"""What a run's time says: how much of it trained, and what held it up. Pure functions of seconds by phase."""

from collections.abc import Mapping

USEFUL = ("forward_backward", "optimizer")
_ADVICE = {
    "data": "waiting for data; raise data.workers or move the data to a faster disk",
    "evaluate": "evaluation; raise evaluate.every_steps or evaluate.batch",
    "checkpoint": "saving; raise checkpoint.every_steps",
    "report": "reporting; raise observe.every_steps",
    "start": "start-up; longer runs amortise it",
}


def goodput(seconds: Mapping[str, float]) -> float:
    """Share of the run's seconds that went into training steps."""
    total = sum(seconds.values())
    return sum(seconds.get(phase, 0.0) for phase in USEFUL) / total if total else 0.0


def verdict(seconds: Mapping[str, float]) -> str:
    """One line: compute-bound, or what took the time instead and what to change."""
    total = sum(seconds.values())
    if not total:
        return "nothing has run yet"
    useful = goodput(seconds)
    lost = {phase: seconds.get(phase, 0.0) / total for phase in _ADVICE}
    worst = max(lost, key=lambda phase: lost[phase])
    if lost[worst] < 0.1 or lost[worst] < 0.25 * useful:
        return f"compute-bound: {useful:.0%} of the time was training steps"
    return f"{lost[worst]:.0%} of the time went to {_ADVICE[worst]}"
