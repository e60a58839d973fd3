"""What happens when in a step: computing in its order, and messages on their wires, each as soon as it can."""

from collections.abc import Sequence
from dataclasses import dataclass

COMPUTE = "compute"
_NO_TIME_S = 1e-12


@dataclass(frozen=True)
class Task:
    """A stretch of computing, or a message."""

    name: str
    stream: str
    """`COMPUTE`, or the wire that the message goes over."""
    seconds: float
    """Where nothing else goes on."""
    after: tuple[int, ...] = ()
    """Numbers of tasks that must be done before."""
    busy: float = 0.0
    """Of a message: what it takes of what computing is done with. 1: as much as computing itself."""


@dataclass(frozen=True)
class Timeline:
    """When each task began and ended, in seconds."""

    starts: list[float]
    ends: list[float]
    exposed_s: float
    """While a message was under way and nothing was computed."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return max(self.ends, default=0.0)


def run(tasks: Sequence[Task]) -> Timeline:
    """Carry out the tasks.

    Computing keeps to the order of the tasks. A wire takes one message at a time, of those that may go the one that has
    waited longest. What is busy beside something else slows both down alike, as processes on one core do.
    """
    assert all(number < index for index, task in enumerate(tasks) for number in task.after), "only earlier ones"
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    left = [task.seconds for task in tasks]
    queues = _queues(tasks)
    ready_at: dict[int, float] = {}
    active: dict[str, int] = {}
    done: set[int] = set()
    now = exposed = 0.0
    while len(done) < len(tasks):
        for stream, waiting in queues.items():
            chosen = _next(tasks, stream, waiting, done, ready_at, now)
            if chosen is not None and stream not in active:
                waiting.remove(chosen)
                active[stream], starts[chosen] = chosen, now
        assert active, "tasks wait for each other"
        rates = _rates([tasks[number] for number in active.values()])
        step = min(left[number] / rates[tasks[number].stream] for number in active.values())
        if COMPUTE not in active:
            exposed += step
        now += step
        for stream, number in list(active.items()):
            left[number] -= step * rates[stream]
            if left[number] <= _NO_TIME_S:
                ends[number] = now
                done.add(number)
                del active[stream]
    return Timeline(starts, ends, exposed)


def _queues(tasks: Sequence[Task]) -> dict[str, list[int]]:
    queues: dict[str, list[int]] = {COMPUTE: []}
    for number, task in enumerate(tasks):
        queues.setdefault(task.stream, []).append(number)
    return queues


def _next(
    tasks: Sequence[Task], stream: str, waiting: list[int], done: set[int], ready_at: dict[int, float], now: float
) -> int | None:
    """Which of the waiting ones is next, if any may go; since when each may is noted."""
    if stream == COMPUTE:
        return waiting[0] if waiting and done.issuperset(tasks[waiting[0]].after) else None
    for number in waiting:
        if number not in ready_at and done.issuperset(tasks[number].after):
            ready_at[number] = now
    able = [number for number in waiting if number in ready_at]
    return min(able, key=lambda number: (ready_at[number], number), default=None)


def _rates(active: Sequence[Task]) -> dict[str, float]:
    """How fast each goes on beside the others, on its stream."""
    load = sum(1.0 if task.stream == COMPUTE else task.busy for task in active)
    shared = 1 / max(1.0, load)
    return {task.stream: shared if task.stream == COMPUTE or task.busy else 1.0 for task in active}
