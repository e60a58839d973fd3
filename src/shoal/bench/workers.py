"""Workers for a measurement: processes on this machine that meet, do a job together, and write down what they find."""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.bench.commands import started
from shoal.core.storage import read_json_lines
from shoal.launch.crew import LOOPBACK
from shoal.launch.environment import network_environment
from shoal.launch.job import own_paths

RECORDS = "records.jsonl"
"""Where rank 0 writes down what was found, in the job's folder."""
_LOOK_EVERY_S = 0.05
_CAUSE_S = 1.0
"""How long the others get to fail as well: the first to end may only have lost the one that failed."""


@dataclass(frozen=True)
class Failure:
    """How a job failed."""

    message: str
    is_refused: bool = False
    """Whether the worker itself said what is wrong with what it was asked for."""
    is_consequence: bool = False
    """Whether it only noticed that another was gone."""


def run_job(
    job: Mapping[str, Any],
    workers: int,
    folder: Path,
    environment: Mapping[str, str],
    found: Callable[[dict[str, Any]], None],
    limit_s: float = 900.0,
) -> Failure | None:
    """Have so many workers do a job, and hand on each record as rank 0 writes it down.

    A job says `what` is to be done, with what `gpus_per_worker` and `backend`; the rest is for those who do it.

    `folder` must be empty; what is in it afterwards is of no use. Whatever happens, no worker is left.
    """
    variables = network_environment(LOOPBACK, {}) | {"TORCH_CPP_LOG_LEVEL": "ERROR"} | dict(environment)
    records = folder / RECORDS
    seen = 0
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(_meeting_place(workers))
        place = {"world_size": workers, "host": LOOPBACK, "port": port, "paths": own_paths(), "parent": os.getpid()}
        file = folder / "job.json"
        file.touch(mode=0o600)  # a recipe may hold what came from the environment
        file.write_text(json.dumps({**job, **place}), encoding="utf-8")
        processes = []
        for rank in range(workers):
            command = [sys.executable, "-P", "-m", "shoal.bench.worker", str(folder), str(rank)]
            processes.append(stack.enter_context(started(command, folder / f"log-{rank}", variables)))
        deadline = time.monotonic() + limit_s
        is_over = False
        while not is_over:
            statuses = [process.poll() for process in processes]
            is_over = None not in statuses or time.monotonic() > deadline
            if any(statuses):
                deadline = min(deadline, time.monotonic() + _CAUSE_S)
            for record in list(read_json_lines(records))[seen:]:
                seen += 1
                found(record)
            time.sleep(_LOOK_EVERY_S)
        return explain(folder, statuses, limit_s)


@contextlib.contextmanager
def _meeting_place(workers: int) -> Iterator[int]:
    """The port where workers find each other, on the loopback alone."""
    from torch._C._distributed_c10d import TCPStore

    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        descriptor = os.dup(server.fileno())
    # It listens as long as it is there.
    store = TCPStore(LOOPBACK, port, workers, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    yield port
    del store


def tell_failure(folder: Path, rank: int, failure: Failure) -> None:
    """For a worker to say why it ends."""
    (folder / f"failure-{rank}.json").write_text(json.dumps(asdict(failure)), encoding="utf-8")


def explain(folder: Path, statuses: list[int | None], limit_s: float) -> Failure | None:
    """What explains best that not all have ended well; None if all have."""
    if not any(status != 0 for status in statuses):
        return None
    told = [Failure(**json.loads(path.read_text())) for path in sorted(folder.glob("failure-*.json"))]
    causes = [failure for failure in told if not failure.is_consequence] or told
    if causes:
        return min(causes, key=lambda failure: not failure.is_refused)
    if any(status is None for status in statuses) and not any(statuses):
        return Failure(f"did not end within {limit_s:.0f} s")
    rank, status = next((rank, status) for rank, status in enumerate(statuses) if status)
    log = (folder / f"log-{rank}").read_text(errors="replace").strip().splitlines()[-1:]
    return Failure(": ".join([f"worker {rank} ended with status {status}", *log]))
