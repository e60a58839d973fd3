"""From the trace of a profiler to what communication costs a step: the time in which nothing is computed meanwhile."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
"""A complete event of a Chrome trace: `name`, `cat`, `tid`, and `ts` and `dur` in microseconds."""
Span = tuple[float, float]

STEP = "shoal:step"
"""What a step is called in a trace."""
_NO_COMPUTE = ("c10d", "_c10d", "autograd::")
"""Operations that start communication, wait for it, or only call others."""
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class StepCost:
    """Where one step of one worker spent its time."""

    step_s: float
    communication_s: float
    """While something was under way between the workers, waiting for a slower one included."""
    exposed_s: float
    """The part of it in which this worker computed nothing."""
    calls: int
    """How often something was sent or received."""


def step_costs(events: Iterable[Event], on_gpu: bool) -> list[StepCost]:
    """What each step in a trace of one worker cost, in their order."""
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    exchanges = [_span(event) for event in complete if is_communication(event)]
    communication = merged(exchanges)
    compute = merged(map(_span, _gpu_compute(complete)) if on_gpu else _host_compute(complete))
    costs = []
    for start, end in sorted(_span(event) for event in complete if _is_step(event)):
        under_way = _within(communication, start, end)
        hidden = overlap(under_way, compute)
        calls = sum(start <= began < end for began, _ in exchanges)
        costs.append(StepCost(_s(end - start), _s(total(under_way)), _s(total(under_way) - hidden), calls))
    return costs


def is_communication(event: Event) -> bool:
    """Gloo's operations, from where they start to where they are done, and NCCL's kernels."""
    name = str(event["name"])
    return name.startswith("gloo:") or (event.get("cat") == "kernel" and "nccl" in name.lower())


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same stretches of time in order, none touching another."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def total(spans: Iterable[Span]) -> float:
    """The length of all of them."""
    return sum(end - start for start, end in spans)


def overlap(first: list[Span], second: list[Span]) -> float:
    """The length of what is in both; each of them merged."""
    length, a, b = 0.0, 0, 0
    while a < len(first) and b < len(second):
        length += max(0.0, min(first[a][1], second[b][1]) - max(first[a][0], second[b][0]))
        if first[a][1] < second[b][1]:
            a += 1
        else:
            b += 1
    return length


def innermost(events: Iterable[Event], wanted: Callable[[str], bool]) -> list[Span]:
    """When the innermost event of a thread was a wanted one: operations call others, and waiting hides inside them."""
    found: list[Span] = []
    open_ones: list[tuple[float, str]] = []
    now = 0.0

    def go_to(time: float) -> None:
        nonlocal now
        while open_ones and now < time:
            end, name = open_ones[-1]
            until = min(end, time)
            if until > now and wanted(name):
                found.append((now, until))
            now = max(now, until)
            if end <= time:
                open_ones.pop()
        now = max(now, time)

    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, end = _span(event)
        go_to(start)
        open_ones.append((end, str(event["name"])))
    go_to(max((end for end, _ in open_ones), default=now))
    return found


def _host_compute(events: Iterable[Event]) -> list[Span]:
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread[event["tid"]].append(event)
    return [span for own in by_thread.values() for span in innermost(own, _computes)]


def _computes(name: str) -> bool:
    """Whether an operation of the host computes: `aten::mm` and the like, and what torch.compile makes of them."""
    return ("::" in name or "_fused_" in name) and not name.startswith(_NO_COMPUTE)


def _gpu_compute(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event.get("cat") in _ON_GPU and not is_communication(event)]


def _is_step(event: Event) -> bool:
    return bool(event["name"] == STEP and event.get("cat") == "user_annotation")  # GPUs have a shadow of it


def _within(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    return [(max(a, start), min(b, end)) for a, b in spans if a < end and b > start]


def _span(event: Event) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _s(microseconds: float) -> float:
    return 1e-6 * microseconds
