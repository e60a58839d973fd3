"""The processes of a run as one: what they tell each other and agree on. Trivial where there is only one."""

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

_FOREVER = datetime.timedelta(days=7)


class Group:
    """Small values over all processes, on the host; gradients go their own way, inside a strategy."""

    def __init__(self, rank: int = 0, world_size: int = 1, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = process_group

    def sibling(self) -> "Group":
        """The same processes once more, for another thread of each: it may talk while this one does, and has all the
        time in the world. Every process must call this."""
        if self.world_size == 1:
            return Group(self.rank)
        return Group(self.rank, self.world_size, dist.new_group(backend="gloo", timeout=_FOREVER))

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank; anything that JSON can hold. Every process must call this."""
        if self.world_size == 1:
            return [value]
        # JSON rather than pickle: what comes over the network is data, never code.
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(text)]), group=self._group)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(text)] = text
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(texts, padded, group=self._group)
        return [
            json.loads(bytes(raw[: int(length)].numpy()).decode()) for raw, length in zip(texts, lengths, strict=True)
        ]

    def gather_numbers(self, values: Sequence[float]) -> torch.Tensor:
        """Everybody's numbers, a row a rank; all give as many. In one message, and every process must call this."""
        own = torch.tensor([values], dtype=torch.float64)
        if self.world_size == 1:
            return own
        found = torch.empty(self.world_size, own.shape[1], dtype=torch.float64)
        dist.all_gather(list(found.unbind()), own[0], group=self._group)
        return found

    def from_first(self, value: Any) -> Any:
        """Rank 0's value. Every process must call this; the others' own values are ignored."""
        return self.gather(value if self.rank == 0 else None)[0]

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all processes. Every process must call this."""
        return self.start_sum(*values)()

    def start_sum(self, *values: float) -> Callable[[], list[float]]:
        """Begin to sum; what is returned waits for the sums. Compute goes on in between."""
        return self._start(values, dist.ReduceOp.SUM)

    def start_max(self, *values: float) -> Callable[[], list[float]]:
        """Begin to find the largest of each value; what is returned waits for them."""
        return self._start(values, dist.ReduceOp.MAX)

    def _start(self, values: tuple[float, ...], operation: Any) -> Callable[[], list[float]]:
        if self.world_size == 1:
            return lambda: list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, op=operation, group=self._group, async_op=True)

        def wait() -> list[float]:
            work.wait()
            return [float(value) for value in tensor.tolist()]

        return wait


def by_network(error: BaseException) -> bool:
    """Whether another worker's end, or the network, explains the error."""
    if isinstance(error, dist.DistError):
        return True
    words = str(error).lower()
    signs = ("connection closed by peer", "connection reset", "connection refused", "broken pipe", "gloo", "nccl")
    return isinstance(error, RuntimeError) and any(sign in words for sign in signs)


@dataclass(frozen=True)
class Meeting:
    """Where and how the processes of a run find each other."""

    rank: int
    world_size: int
    host: str
    """Address of rank 0, as the others reach it."""
    port: int
    timeout_s: float
    """How long a collective may take before torch gives up; the launcher notices a hang long before."""
    listen_fd: int | None = None
    """Rank 0's listening socket, bound to `host` by whoever started it: torch itself would listen everywhere."""
    hosted: bool = False
    """Somebody else listens there: torchrun's agent."""
    prefix: str = ""
    """The part of a store that is this start's own: one that outlives workers still holds what earlier ones said."""


@contextlib.contextmanager
def joined(meeting: Meeting, device: torch.device, backend: str = "auto") -> Iterator[Group]:
    """Be one of the processes of a run, for as long as it is entered."""
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=meeting.timeout_s)
    options: dict[str, Any] = {"backend": backend, "timeout": timeout}
    if device.type == "cuda" and backend == "nccl":
        torch.cuda.set_device(device)
        options["device_id"] = device
    options |= {"store": _store(meeting, timeout), "rank": meeting.rank, "world_size": meeting.world_size}
    dist.init_process_group(**options)
    try:
        # A group of its own for small values: on the host, and never in the way of gradients.
        control = dist.new_group(backend="gloo", timeout=timeout)
        yield Group(dist.get_rank(), dist.get_world_size(), control)
    finally:
        dist.destroy_process_group()


def _store(meeting: Meeting, timeout: datetime.timedelta) -> Store:
    if meeting.world_size == 1 and meeting.listen_fd is None:
        return HashStore()
    store = TCPStore(
        meeting.host,
        meeting.port,
        meeting.world_size,
        is_master=meeting.rank == 0 and not meeting.hosted,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=meeting.listen_fd,
    )
    return PrefixStore(meeting.prefix, store) if meeting.prefix else store
