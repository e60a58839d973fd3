"""Numbers and events of a run in words."""

import time
from collections.abc import Mapping
from typing import Any

from shoal.observe.console import event_line, format_metric
from shoal.observe.monitor.facts import Facts
from shoal.observe.monitor.values import one_line
from shoal.observe.runs import resume_command


def duration(seconds: float | None) -> str:
    """`42 s`, `12 min 05 s`, `3 h 12 min`, `2 d 04 h`."""
    if seconds is None:
        return "-"
    whole = int(max(seconds, 0.0))
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller:02d} {small_unit}"
    return f"{whole} s"


def short_time(seconds: float | None) -> str:
    """What is often much less than a second: `0.2 ms`, `35 ms`, `1.2 s`."""
    if seconds is None:
        return "-"
    if seconds >= 60:
        return duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else _ms(seconds)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def size(num_bytes: float | None) -> str:
    """`223 kB`, `4.1 GB`."""
    if num_bytes is None:
        return "-"
    value = max(num_bytes, 0.0)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def amount(value: float) -> str:
    """A rate or a count: `12.3`, `1,240`, `3.4 M`."""
    if value >= 9_999_500:
        return f"{value / 1e6:,.1f} M"
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def share(value: float) -> str:
    """In percent; what is there at all is not 0%."""
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"


def event_words(event: Mapping[str, Any]) -> str:
    """An event in words; by its name where there are none for it, or where it lacks what they need."""
    name = str(event.get("event"))
    try:
        if name in _OWN:
            return one_line(_OWN[name].format_map(event))
        words = event_line(name, dict(event))
    except (KeyError, ValueError, TypeError, AttributeError, IndexError):
        words = None
    return one_line(words if words is not None else name.replace("_", " "))


_OWN = {
    "start": "workers are ready: {world_size} ({strategy}), at step {step} of {num_steps}",
    "forgotten": "steps after {after_step} up to {to_step} are lost, and made again",
    "done": "done at step {step}",
    "failed": "failed: {message}",
    "interrupted": "interrupted at step {step}, which is saved",
}


def event_time(event: Mapping[str, Any], clock: float) -> str:
    """`18:15:22`, or with its day where that is not today's."""
    try:
        when = time.localtime(event["time"])
        is_today = time.strftime("%F", when) == time.strftime("%F", time.localtime(clock))
    except (OverflowError, ValueError, OSError):
        return "?"
    return time.strftime("%T" if is_today else "%b %d %H:%M", when)


def ending(facts: Facts) -> str:
    """How a run ended, in one line."""
    went_on = f"; go on with: {resume_command_of(facts)}"
    if facts.status == "gone":
        return f"the run's folder is gone: {facts.run_dir}"
    if facts.status == "failed":
        return f"failed at step {facts.step:,}: {one_line(facts.error) or 'no word why'}{went_on}"
    if facts.status == "interrupted":
        return f"interrupted at step {facts.step:,}{went_on}"
    if facts.status == "stopped":
        return f"stopped at step {facts.step:,} without a word, and nobody trains there now{went_on}"
    names = ("train_loss", *sorted(name for name in facts.metrics if name.startswith("val_")))
    metrics = "  ".join(f"{name} {format_metric(name, facts.metrics[name])}" for name in names if name in facts.metrics)
    return f"done: {facts.step:,} steps in {duration(facts.elapsed_s)}" + (f"  {metrics}" if metrics else "")


def resume_command_of(facts: Facts) -> str:
    """What to type to go on with it."""
    from pathlib import Path

    return resume_command(Path(facts.run_dir))
