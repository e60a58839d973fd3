"""How long a run will still take, from what its steps took of late and what it does now and then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

OCCASIONAL = ("evaluate", "checkpoint")
"""What a run does now and then, so that the last minute may hold none of it, or little else."""
ONCE = ("start", "end")
"""What does not come again with every step."""


class Pace(NamedTuple):
    """A report, as far as it says how fast a run goes."""

    time: float
    """Unix seconds of the machine that wrote it."""
    steps: int
    """Since the report before."""
    seconds: Mapping[str, float]
    """By phase, since the report before."""


@dataclass
class Habit:
    """What a run has done now and then."""

    seconds: float = 0.0
    last_step: int = 0
    """When it did so last: what it took belongs to the steps up to there, not to those since."""

    def per_step_s(self) -> float:
        """Spread over the steps."""
        return self.seconds / self.last_step if self.last_step > 0 else 0.0


def step_s(paces: Sequence[Pace], habits: Mapping[str, Habit]) -> float | None:
    """What a step takes, with its part of evaluations and saves; None as long as too little is known.

    Args:
        paces: Of late and since the workers were started; the first of them may hold what happens but once.
        habits: Of the whole run, by phase.
    """
    stepping = [pace for pace in paces if pace.steps > 0]
    if len(stepping) > 1:
        stepping = stepping[1:]
    steps = sum(pace.steps for pace in stepping)
    if not steps:
        return None
    left_out = (*OCCASIONAL, *ONCE)
    seconds = sum(s for pace in stepping for phase, s in pace.seconds.items() if phase not in left_out)
    return seconds / steps + sum(habit.per_step_s() for habit in habits.values())


def left_s(
    steps_left: int, paces: Sequence[Pace], habits: Mapping[str, Habit], since_report_s: float = 0.0
) -> float | None:
    """Seconds until the last step, as things go now.

    Args:
        since_report_s: What has passed since the last report, during which steps were done that are not reported yet:
            at most as many as between reports.
    """
    if steps_left <= 0:
        return 0.0
    each_s = step_s(paces, habits)
    if each_s is None:
        return None
    usual_steps = max((pace.steps for pace in paces), default=0)
    return max(0.0, steps_left * each_s - min(max(since_report_s, 0.0), usual_steps * each_s))
