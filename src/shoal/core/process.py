"""Which process of the run this is, and the device it computes on."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from shoal.core.errors import UserError
from shoal.core.group import Group


@dataclass(frozen=True)
class Process:
    """One of `world_size` processes that train together; rank 0 writes what is written once."""

    rank: int
    world_size: int
    device: torch.device
    group: Group = field(default_factory=Group)
    local_rank: int = 0
    local_world_size: int = 1
    node: str = ""
    """The machine, as the launcher calls it; processes of one name share memory and a fast network."""
    address: str = ""
    """Where workers on other machines reach this one; the loopback address where there are none."""
    agent_pid: int | None = None
    """The process that watches over this one, where there is one."""
    tell: Callable[[str], None] = field(default=lambda words: None, compare=False)
    """Shows a line to whoever watches the run, while it gets ready."""

    @property
    def is_first(self) -> bool:
        """Whether this one writes what is written once."""
        return self.rank == 0


def choose_device(gpus_per_worker: float | None, local_rank: int = 0) -> torch.device:
    """The device for a worker: None takes a GPU where there is one, 0 the CPU, 1 or a share a GPU or an error."""
    available = torch.cuda.is_available()
    if gpus_per_worker == 0 or (gpus_per_worker is None and not available):
        return torch.device("cpu")
    if not available:
        raise UserError(
            f"cluster.gpus_per_worker: {gpus_per_worker:g} GPU is asked for and PyTorch sees none; "
            "leave out --gpu, set cluster.gpus_per_worker=0, or check the driver with nvidia-smi"
        )
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"cluster.workers: worker {local_rank + 1} of this machine has no GPU of its own, PyTorch sees "
            f"{torch.cuda.device_count()}; start fewer workers, or set cluster.gpus_per_worker=0"
        )
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def pinned(process: Process, threads: int | None) -> Iterator[None]:
    """Keep this process, with every thread it has or starts, to `threads` cores; other workers get other ones.

    None: an equal share of the cores.
    """
    usable = sorted(os.sched_getaffinity(0))
    workers = process.local_world_size
    count = threads or max(1, len(usable) // workers)
    if count * workers > len(usable):
        raise UserError(
            f"cluster.pin_cores: {workers} workers with {count} threads each need {count * workers} cores on one "
            f"machine and there are {len(usable)}; set fewer cluster.workers or cluster.threads_per_worker"
        )
    _keep_to(usable[process.local_rank * count : (process.local_rank + 1) * count])
    try:
        yield
    finally:
        _keep_to(usable)


def _keep_to(cores: list[int]) -> None:
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - names alone
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
