"""One rank of the doctor's all-reduce: `python -m shoal.deploy.doctor.reduce_rank FD`, with its job on stdin.

A process of its own, because a collective that hangs can only be ended with the process. It ends when stdin does, so
that none is left when whoever started it is killed. How far it is, it writes to the descriptor, one JSON a line.
"""

import json
import os
import sys
import threading
import time
from typing import Any

SMALL, LARGE = 1 << 18, 4 << 20
"""Numbers of four bytes: 1 MiB to see whether it works and how fast, 16 MiB to measure."""
ROUNDS = 3
_FAST_ENOUGH_S = 0.3
"""Of the small one: on a slower network it is the measurement."""


def main() -> int:
    """Take part; 1 if it failed."""
    out = os.fdopen(int(sys.argv[1]), "w", buffering=1)

    def tell(stage: str, **facts: Any) -> None:
        out.write(json.dumps({"stage": stage, **facts}) + "\n")

    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        _take_part(job, tell)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the user wants to know
        words = next(iter(str(error).strip().splitlines()), "")
        tell("failed", error=f"{type(error).__name__}: {words}"[:500])
        return 1
    return 0


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(1)


def _take_part(job: dict[str, Any], tell: Any) -> None:
    import socket

    import torch

    from shoal.core.group import Meeting, joined

    tell("ready")
    device = torch.device("cuda", job["gpu"]) if job["backend"] == "nccl" else torch.device("cpu")
    # Ranks that cannot even reach the first are told from those that others wait for.
    with socket.create_connection((job["host"], job["port"]), timeout=job["timeout_s"]):
        tell("reached")
    meeting = Meeting(
        job["rank"], job["world_size"], job["host"], job["port"], job["timeout_s"], listen_fd=job.get("listen_fd")
    )
    with joined(meeting, device, job["backend"]) as group:
        tell("joined")
        small = _reduce(SMALL, job, device)  # the first one also builds connections
        small = _reduce(SMALL, job, device)
        count, times = SMALL, [small["s"]]
        slowest = max(float(row[0]) for row in group.gather_numbers([small["s"]]))
        if slowest < _FAST_ENOUGH_S:
            count, times = LARGE, [_reduce(LARGE, job, device)["s"] for _ in range(ROUNDS)]
        seconds = sorted(times)[len(times) // 2]
        tell("done", s=seconds, bytes=4 * count)


def _reduce(count: int, job: dict[str, Any], device: Any) -> dict[str, float]:
    """Sum over all ranks; every number is compared with what it must be."""
    import torch
    import torch.distributed as dist

    pattern = torch.arange(count, device=device, dtype=torch.float32) % 251
    # Whole numbers below 2**24 are exact in any order, up to 8,000 ranks.
    own = pattern * _factor(job["rank"])
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(own)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    expected = pattern * sum(map(_factor, range(job["world_size"])))
    wrong = int((own != expected).sum())
    if wrong:
        raise ValueError(f"the sum is wrong in {wrong} of {count} numbers")
    return {"s": seconds}


def _factor(rank: int) -> int:
    """Ranks give different numbers, so that one which counts twice in place of another is noticed."""
    return rank % 8 + 1


if __name__ == "__main__":
    sys.exit(main())
