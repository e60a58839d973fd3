"""How fast workers of this machine exchange data between stretches of computing, as they do in a step.

A collective that is called over and over finds its data in the cache and every worker awake. So each call here comes
after some milliseconds of arithmetic, and what it costs is what it adds to them; once while all wait for it, and once
beside the arithmetic, which tells how much of a core it takes. Runs on every worker.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench.comm_collectives import gather_into, scatter_into
from shoal.bench.commands import in_turns
from shoal.core.memory import keep_freed_memory
from shoal.core.process import Process

_CALLS = 5
"""In a row, of each way to call it."""
_STRETCH_S = 0.006
"""Of arithmetic beside the smallest messages; larger ones get more of it, so that there is some all the while."""
_STRETCH_BYTES = 4 << 20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ALL, PAIRS, ACROSS = "all", "pairs", "across"
"""Who takes part: everybody; neighbours, two by two, all pairs at once; one of each pair, likewise."""
Case = tuple[str, str, str]
"""Who, which collective, and of what type."""


def cases_of(workers: int) -> list[Case]:
    """What the strategies send among so many workers."""
    found = [(ALL, "all_reduce", dtype) for dtype in ("fp32", "bf16")]
    found += [(ALL, name, "fp32") for name in ("all_gather", "reduce_scatter")]
    if workers > 2:
        found += [(PAIRS, name, "fp32") for name in ("all_gather", "reduce_scatter")]
        found.append((ACROSS, "all_reduce", "fp32"))
    return found


def measure(process: Process, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A record for each case and size, with the seconds of every round: `waited`, and what it takes `beside`."""
    keep_freed_memory()
    groups = _groups(process)
    arithmetic = _Arithmetic(process)
    cases = {f"{' '.join(case)} {size}": (case, size) for case in cases_of(process.world_size) for size in sizes}
    records: list[dict[str, Any]] = [
        {"who": case[0], "collective": case[1], "dtype": case[2], "bytes": size, "waited_s": [], "beside_s": []}
        for case, size in cases.values()
    ]
    by_name = dict(zip(cases, records, strict=True))
    for number in range(rounds):
        for name in in_turns(cases, number):
            case, size = cases[name]
            waited, beside = _costs(_prepare(case, size, groups[case[0]]), arithmetic, size, process)
            by_name[name]["waited_s"].append(waited)
            by_name[name]["beside_s"].append(beside)
    return records


def _groups(process: Process) -> dict[str, Any]:
    """The group of this worker for each `who`. Every worker makes all of them, in the same order."""
    rank, count = process.rank, process.world_size
    own = {ALL: dist.group.WORLD}
    if count > 2:
        half = count // 2
        for who, members in (
            (PAIRS, [[2 * pair, 2 * pair + 1] for pair in range(half)]),
            (ACROSS, [[side, side + 2] for side in range(2)]),
        ):
            made = {tuple(ranks): dist.new_group(ranks) for ranks in members}
            own[who] = next(group for ranks, group in made.items() if rank in ranks)
    return own


class _Arithmetic:
    """What workers compute between messages."""

    def __init__(self, process: Process) -> None:
        self._left, self._right = torch.rand(512, 512), torch.rand(512, 512)
        self._much = torch.rand(1 << 20)
        self.run(3)
        process.group.sum(0.0)
        began = time.perf_counter()
        self.run(5)
        (took_s,) = process.group.start_max((time.perf_counter() - began) / 5)()
        self._times = _STRETCH_S / took_s

    def stretch(self, size: int) -> Callable[[], None]:
        """So much of it as goes with a message of a size."""
        times = max(1, round(self._times * max(1.0, size / _STRETCH_BYTES)))
        return lambda: self.run(times)

    def run(self, times: int) -> None:
        """Products of matrices, and a walk through memory."""
        for _ in range(times):
            torch.mm(self._left, self._right)
            self._much.mul_(1.0001)


def _prepare(case: Case, size: int, group: Any) -> Callable[[bool], Any]:
    """One call; told whether to return before it is done."""
    _, name, dtype = case
    members = dist.get_world_size(group)
    element = torch.finfo(_DTYPES[dtype]).bits // 8
    part = torch.ones(max(1, size // element // members), dtype=_DTYPES[dtype])
    whole = torch.ones(len(part) * members, dtype=_DTYPES[dtype])
    if name == "all_reduce":
        return lambda is_async: dist.all_reduce(whole, group=group, async_op=is_async)
    if name == "all_gather":
        return lambda is_async: gather_into(whole, part, group=group, async_op=is_async)
    return lambda is_async: scatter_into(part, whole, group=group, async_op=is_async)


def _costs(call: Callable[[bool], Any], arithmetic: _Arithmetic, size: int, process: Process) -> tuple[float, float]:
    """Seconds that a call adds to a stretch of arithmetic: after it, and beside it."""
    compute = arithmetic.stretch(size)

    def after() -> None:
        compute()
        call(False)

    def beside() -> None:
        work = call(True)
        compute()
        work.wait()

    after()
    alone_s, after_s, beside_s = (_timed(run, process) for run in (compute, after, beside))
    return after_s - alone_s, beside_s - alone_s


def _timed(run: Callable[[], object], process: Process) -> float:
    """Seconds of one of some runs in a row, begun by all at once; of the slowest worker."""
    process.group.sum(0.0)
    began = time.perf_counter()
    for _ in range(_CALLS):
        run()
    return process.group.start_max((time.perf_counter() - began) / _CALLS)()[0]
