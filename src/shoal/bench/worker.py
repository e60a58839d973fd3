"""One worker of a measurement: `python -m shoal.bench.worker FOLDER RANK` does the job that lies in the folder."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.bench.workers import RECORDS, Failure, tell_failure
from shoal.core.errors import RunError, UserError
from shoal.core.group import Meeting, by_network, joined
from shoal.core.process import Process, choose_device
from shoal.core.sessions import end_with_parent
from shoal.core.storage import to_json_line

_TIMEOUT_S = 600.0
"""How long a worker waits for the others, which may be compiling something; one that ends is noticed at once."""


def main() -> int:
    """Do the job; the exit status."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for whoever measures
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    if os.getppid() != job["parent"]:  # it has gone before it could take this one along
        return 1
    sys.path[:0] = [path for path in job["paths"] if path not in sys.path]
    try:
        _do(job, folder, rank)
    except BaseException as error:  # noqa: BLE001 - told in full
        traceback.print_exc()
        words = str(error).strip().splitlines()[:1]
        is_refused = isinstance(error, UserError)
        message = (
            "".join(words) if is_refused or isinstance(error, RunError) else ": ".join([type(error).__name__, *words])
        )
        tell_failure(folder, rank, Failure(message, is_refused, is_consequence=by_network(error)))
        return 1
    return 0


def _do(job: dict[str, Any], folder: Path, rank: int) -> None:
    world_size = job["world_size"]
    device = choose_device(job["gpus_per_worker"], rank)
    meeting = Meeting(rank, world_size, job["host"], job["port"], _TIMEOUT_S, hosted=True)
    if job["what"] in _APART:  # the only one of its group
        meeting = Meeting(0, 1, job["host"], job["port"], _TIMEOUT_S)
    with joined(meeting, device, job["backend"]) as group, (folder / RECORDS).open("a", encoding="utf-8") as records:
        process = Process(
            meeting.rank,
            meeting.world_size,
            device,
            group,
            local_rank=rank,
            local_world_size=world_size,
            node="here",
            address=job["host"],
        )

        def found(record: dict[str, Any]) -> None:
            if rank == 0:
                records.write(to_json_line(record) + "\n")
                records.flush()

        _JOBS[job["what"]](process, job, folder, found)
        group.sum(0.0)  # nobody leaves while another still needs it


def _collectives(process: Process, job: dict[str, Any], folder: Path, found: Callable[[dict[str, Any]], None]) -> None:
    import torch

    from shoal.bench import comm_collectives

    torch.set_num_threads(job["threads"])
    for record in comm_collectives.measure(process, job["sizes"], job["rounds"]):
        found(record)


def _steps(process: Process, job: dict[str, Any], folder: Path, found: Callable[[dict[str, Any]], None]) -> None:
    from shoal.bench import comm_steps

    for name, tree in job["recipes"].items():
        found({"name": name} | comm_steps.measure(process, tree, job["steps"], job["threads"], folder))


def _memory(process: Process, job: dict[str, Any], folder: Path, found: Callable[[dict[str, Any]], None]) -> None:
    from shoal.bench import plan_memory

    for record in process.group.gather(plan_memory.measure(process, job["recipe"], job["steps"])):
        found(record)


def _links(process: Process, job: dict[str, Any], folder: Path, found: Callable[[dict[str, Any]], None]) -> None:
    import torch

    from shoal.bench import simulate_links

    torch.set_num_threads(job["threads"])
    for record in simulate_links.measure(process, job["sizes"], job["rounds"]):
        found(record)


def _together(process: Process, job: dict[str, Any], folder: Path, found: Callable[[dict[str, Any]], None]) -> None:
    from shoal.bench import simulate_steps

    for name, tree in job["recipes"].items():
        found({"name": name} | simulate_steps.measure(process, tree, job["steps"], job["threads"], None))


def _alone(process: Process, job: dict[str, Any], folder: Path, found: Callable[[dict[str, Any]], None]) -> None:
    from torch._C._distributed_c10d import TCPStore

    from shoal.bench import simulate_steps

    count = process.local_world_size
    store = TCPStore(job["host"], job["port"], count, is_master=False, wait_for_workers=False) if count > 1 else None
    meeting = simulate_steps.Meeting(store, process.local_rank, count)
    for name, tree in job["recipes"].items():
        found({"name": name} | simulate_steps.measure(process, tree, job["steps"], job["threads"], meeting))
    meeting.wait()


def _shape(process: Process, job: dict[str, Any], folder: Path, found: Callable[[dict[str, Any]], None]) -> None:
    from shoal.bench import simulate_steps

    found(simulate_steps.measure_shape(process, job["recipe"], job["steps"], job["threads"]))


_JOBS = {
    "collectives": _collectives,
    "steps": _steps,
    "memory": _memory,
    "links": _links,
    "together": _together,
    "alone": _alone,
    "shape": _shape,
}
_APART = ("alone", "shape")
"""Jobs whose workers have nobody to send to."""


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # PyTorch aborts now and then when a process that used Gloo winds up
