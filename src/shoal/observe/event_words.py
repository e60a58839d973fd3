"""What happens to a run, in words: as it happens, and told afterwards."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

_MOST_STACKS = 4


def event_line(name: str, fields: dict[str, Any]) -> str | None:
    """An event as it happens, if a person wants to read of it."""
    if name == "start":
        workers = f"{fields['world_size']} workers ({fields['strategy']}), " if fields["world_size"] > 1 else ""
        micro_batch = f" in micro-batches of {fields['micro_batch']}" if fields["accumulation"] > 1 else ""
        numerics = fields.get("numerics", "fp32")
        device = fields["device"] if numerics == "fp32" else f"{fields['device']} in {numerics}"
        return (
            f"{fields['run']}: {fields['parameters']:,} parameters on {workers}{device}, "
            f"{fields['train_samples']:,} samples, {fields['num_steps']:,} steps of {fields['global_batch']}"
            f"{micro_batch}"
        )
    if name == "profile":
        first, last = fields["steps"]
        steps = f"step {first} is" if first == last else f"steps {first} to {last} are"
        return f"worker {fields['rank']}: {steps} recorded in {fields['path']}"
    words = _WORDS.get(name)
    if words is None:
        return None
    return "\n".join([words.format_map(fields), *_stack_lines(fields.get("stacks", {}), fields.get("ranks", []))])


def _stack_lines(stacks: dict[str, str], first: list[int]) -> Iterator[str]:
    """Of a few workers, those of `first` before the others: a log is no place for the stacks of hundreds."""
    ranks = sorted(stacks, key=lambda rank: (int(rank) not in first, int(rank)))
    for rank in ranks[:_MOST_STACKS]:
        yield from (f"[rank {rank}] {line}" for line in stacks[rank].splitlines())
    if len(ranks) > _MOST_STACKS:
        yield f"the stacks of all {len(ranks)} workers are in events.jsonl"


_WORDS = {
    "resume": "resuming from step {step}",
    "initial_weights": "{words}",
    "settled": "{words}",
    "checkpoint_rejected": "checkpoint of step {step} is corrupt and set aside: {reason}",
    "fetched": "step {step} comes from {from}",
    "save_failed": "step {step} could not be saved ({message}); it is tried again",
    "save_recovered": "step {step} is saved: the disk takes checkpoints again",
    "waiting_to_save": (
        "waiting up to {for_s:g} s until step {step} can be saved (checkpoint.give_up_after_s): make room, "
        "or press Ctrl-C twice to end without it"
    ),
    "save_superseded": "step {step} was not saved in time: a newer one takes its place",
    "upload_failed": "step {step} is not uploaded yet, and stays in the run's folder until it is: {message}",
    "upload_recovered": "step {step} is uploaded: the store takes checkpoints again",
    "compiling": "compiling the model (the first steps take longer)",
    "compiled": "{words}",
    "recompiled": "{words}",
    "recompile_limit": "{words}",
    "warning": "warning: {message}",
    "data": "{message}",
    "data_skipped": "left out, because it could not be read (data.on_error skip; {skipped} so far): {newest}",
    "early_stop": "stopping early at step {step}: {metric} has not improved on {best:.4f}",
    "print": "[rank {rank}] {line}",
    "starting": "{what}",
    "dashboard": "Ray's dashboard: {url}",
    "metrics": "metrics for Prometheus: {url}",
    "waiting": "waiting for {for} ({seconds_left} s left)",
    "failure": "worker {rank}: {message}",
    "restart": "starting again (restart {restarts})",
    "resize": "going on with {to} workers instead of {from}",
    "preemption": "a machine is about to go: saving, then going on without it",
    "hang": "workers {ranks} made no progress for {timeout_s:g} s; where they were:",
    "slow_start": "workers {ranks} are not ready to train after {timeout_s:g} s; where they are:",
}


def event_words(event: Mapping[str, Any]) -> str:
    """A line of events.jsonl as a person would tell it, in one line and whatever it lacks."""
    name = str(event.get("event"))
    try:
        words = _AFTERWARDS[name].format_map(event) if name in _AFTERWARDS else event_line(name, dict(event))
        if name == "start":
            workers = "1 worker" if event["world_size"] == 1 else f"{event['world_size']} workers"
            words = f"{workers} ready{words}"
    except (LookupError, TypeError, ValueError, AttributeError):  # of another version, or not written by Shoal
        words = None
    if words:
        return one_line(words)
    left_out = ("time", "event", "stacks", "traceback")
    told = [f"{key}={value}" for key, value in event.items() if key not in left_out]
    return one_line(", ".join([name.replace("_", " "), *told]))


_AFTERWARDS = {
    "start": " on {device} ({strategy}), at step {step:,} of {num_steps:,}",
    "first_step": "first step done: step {step:,}",
    "save": "step {step:,} saved",
    "upload": "step {step:,} uploaded",
    "restart": "workers are started again (restart {restarts})",
    "resume": "going on from the checkpoint of step {step:,}",
    "forgotten": "steps after {after_step:,} up to {to_step:,} are lost, and made again",
    "done": "done at step {step:,}",
    "interrupted": "interrupted at step {step:,}, which is saved",
    "failed": "failed: {message}",
}


def event_time(event: Mapping[str, Any], clock: float) -> str:
    """`18:15:22`, or with its day where that is not the one of `clock`."""
    try:
        when = time.localtime(event["time"])
        is_today = time.strftime("%F", when) == time.strftime("%F", time.localtime(clock))
    except (OverflowError, ValueError, OSError):
        return "?"
    return time.strftime("%T" if is_today else "%b %d %H:%M", when)


def one_line(text: object) -> str:
    """Of text that anybody may have written, what can be shown in a line: no controls, no second line."""
    lines = str(text).strip().splitlines()
    return "".join(c if c.isprintable() else " " for c in (lines[0] if lines else ""))
