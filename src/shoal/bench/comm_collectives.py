"""How fast workers exchange data, by collective and size. Runs on every worker."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench.commands import in_turns
from shoal.core.process import Process

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
_ELEMENT = 4
"""Bytes of a float."""
_WARMUP = 2
_ROUND_S = 0.04
"""How long a collective is repeated in a round, so that the clock does not matter."""
_MOST_CALLS = 200


def bus_factor(collective: str, workers: int) -> float:
    """What the bandwidth of a collective is multiplied by to compare with that of the wires, as nccl-tests define it.

    Every byte of an all-reduce must leave and reach each worker but for its own share, there and back; the others are
    half of one.
    """
    return (2 if collective == "all_reduce" else 1) * (workers - 1) / workers


def measure(process: Process, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A record for each collective and size: seconds of one call by the slowest worker, the median over the rounds."""
    largest = torch.ones(_rounded(max(sizes), process.world_size) // _ELEMENT, device=process.device)
    part = torch.ones(len(largest) // process.world_size, device=process.device)
    cases = {(name, size): _prepare(name, size, largest, part) for name in COLLECTIVES for size in sizes}
    calls = {case: _calls_in_a_round(run, process) for case, run in cases.items()}
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    by_name = {f"{name} {size}": (name, size) for name, size in cases}
    for number in range(rounds):
        for case in map(by_name.__getitem__, in_turns(by_name, number)):
            took_s = _time(cases[case], calls[case], process)
            seconds[case].append(process.group.start_max(took_s)()[0])
    return [_record(name, size, times, process.world_size) for (name, size), times in seconds.items()]


def _record(name: str, size: int, seconds: list[float], workers: int) -> dict[str, Any]:
    """Bandwidths in GB (10^9 bytes) a second."""
    size = _rounded(size, workers)
    took_s = statistics.median(seconds)
    bandwidth = size / took_s / 1e9
    return {
        "collective": name,
        "bytes": size,
        "us": 1e6 * took_s,
        "algorithm_gb_per_s": bandwidth,
        "bus_gb_per_s": bandwidth * bus_factor(name, workers),
        "rounds_us": [1e6 * each for each in seconds],
    }


def _rounded(size: int, workers: int) -> int:
    """Divisible into whole numbers, as many for each worker."""
    return max(1, size // (_ELEMENT * workers)) * _ELEMENT * workers


def _prepare(name: str, size: int, largest: torch.Tensor, largest_part: torch.Tensor) -> Callable[[], object]:
    """One call. `size` is what a worker holds of it where it is whole: before the call, after it, or both."""
    workers = len(largest) // len(largest_part)
    whole = largest[: _rounded(size, workers) // _ELEMENT]
    part = largest_part[: len(whole) // workers]
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if name == "all_gather":
        return lambda: gather_into(whole, part)
    return lambda: scatter_into(part, whole)


def gather_into(whole: torch.Tensor, part: torch.Tensor, **how: Any) -> Any:
    """All-gather. Since PyTorch 2.13 under another name; the older one warns there."""
    gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, **how)


def scatter_into(part: torch.Tensor, whole: torch.Tensor, **how: Any) -> Any:
    """Reduce-scatter, likewise."""
    scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, whole, **how)


def _calls_in_a_round(run: Callable[[], object], process: Process) -> int:
    """As many as fill a round, the same on every worker."""
    _time(run, _WARMUP, process)
    (took_s,) = process.group.start_max(_time(run, 1, process))()
    return max(1, min(_MOST_CALLS, round(_ROUND_S / took_s)))


def _time(run: Callable[[], object], calls: int, process: Process) -> float:
    """Seconds of one call out of so many in a row, begun by all workers at once."""
    process.group.sum(0.0)
    _wait(process.device)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(process.device)
    return (time.perf_counter() - began) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
