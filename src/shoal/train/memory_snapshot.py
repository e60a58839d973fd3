"""What held a GPU's memory when there was no more of it: a snapshot for PyTorch's viewer, and the same for reading."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.core.storage import write_atomically
from shoal.train.profiling import FOLDER, file_stem

_MOST_EVENTS = 100_000
"""Allocations and frees that are remembered, a few hundred bytes each."""
_MOST_GROUPS = 30
_MOST_FRAMES = 12
_LIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")


@contextlib.contextmanager
def memory_history(device: torch.device, is_kept: bool) -> Iterator[None]:
    """Have every allocation remember where in the Python code it was made, about 2 us each; nothing on a CPU."""
    is_on = is_kept and device.type == "cuda" and _tried(_keep_history)
    try:
        yield
    finally:
        if is_on:
            _tried(lambda: torch.cuda.memory._record_memory_history(None))


def _keep_history() -> None:
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=_MOST_EVENTS)


def snapshot_on_oom(error: BaseException, run_dir: Path, rank: int, device: torch.device) -> Path | None:
    """Where the error is that the GPU's memory is full, write down what holds it: RUN_DIR/profile/rank-N.memory.pickle,
    and .json, which is returned.

    None on a CPU, before there is a run's folder, and where it could not be written. To be called while the error is
    being handled: as long as it is, the tensors of the step that failed are still there.
    """
    if device.type != "cuda" or not isinstance(error, torch.OutOfMemoryError) or not run_dir.is_dir():
        return None
    stem = run_dir / FOLDER / file_stem(rank)
    readable = stem.with_name(f"{stem.name}.memory.json")
    try:
        stem.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(stem.with_name(f"{stem.name}.memory.pickle")))  # type: ignore[no-untyped-call]
        free, total = torch.cuda.mem_get_info(device)
        facts = {
            "rank": rank,
            "device": torch.cuda.get_device_name(device),
            "time": round(time.time(), 3),
            "device_bytes": total,
            "device_free_bytes": free,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        }
        own = [part for part in torch.cuda.memory._snapshot()["segments"] if part.get("device") == device.index]
        write_atomically(readable, json.dumps(facts | describe(own), indent=1) + "\n")
    except Exception as why:  # noqa: BLE001 - the run has failed already, and that is what must be told
        print(f"no memory snapshot of worker {rank}: {type(why).__name__}: {why}", file=sys.stderr, flush=True)
        return None
    return readable


def describe(segments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What PyTorch has from the device, what of it is in use, and by whom: the biggest first.

    Allocations of one size from one place in the code are one entry; without history, those of one size are.
    """
    blocks = [block for segment in segments for block in segment.get("blocks", ())]
    live = [block for block in blocks if block.get("state") in _LIVE]
    groups: dict[tuple[int, tuple[str, ...]], int] = {}
    for block in live:
        key = (int(block.get("requested_size") or block["size"]), _stack(block))
        groups[key] = groups.get(key, 0) + 1
    biggest = sorted(groups.items(), key=lambda item: (-item[0][0] * item[1], item[0][1]))
    return {
        "allocated_bytes": sum(block["size"] for block in live),
        "reserved_bytes": sum(segment["total_size"] for segment in segments),
        "largest_free_block_bytes": max((b["size"] for b in blocks if b.get("state") == "inactive"), default=0),
        "with_stacks": any(stack for _, stack in groups),
        "biggest": [
            {"total_bytes": size * count, "bytes": size, "count": count, "stack": list(stack)}
            for (size, stack), count in biggest[:_MOST_GROUPS]
        ],
    }


def _stack(block: Mapping[str, Any]) -> tuple[str, ...]:
    """Where it was allocated, innermost first: without PyTorch's own code, unless there is nothing else."""
    frames = block.get("frames") or ()
    if not frames and (history := block.get("history")):  # as torch wrote it before
        frames = history[0].get("frames") or ()
    lines = [(str(f.get("filename", "")), f"{f.get('filename')}:{f.get('line')} {f.get('name')}") for f in frames]
    own = [line for file, line in lines if "/torch/" not in file and file not in ("", "??")]
    return tuple((own or [line for _, line in lines])[:_MOST_FRAMES])


def _tried(do: Callable[[], None]) -> bool:
    """Whether it worked; if not, a run goes on without it."""
    try:
        do()
    except Exception as error:  # noqa: BLE001 - another allocator, a build without it: training goes on
        print(f"no memory history: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return False
    return True
