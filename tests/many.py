"""Real worker processes for tests: N ranks that meet on loopback, as those of a launcher do.

They are forked from a warm process that has torch imported and has never computed (forking one that has is not safe),
stay joined, and run one function after the other: a test costs what its function costs.
"""

import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from shoal.core.group import Meeting, joined
from shoal.core.process import Process
from shoal.launch.environment import network_environment

LOOPBACK = "127.0.0.1"
CPU = torch.device("cpu")


class Ranks:
    """`ranks(function, ...)` is what `function(process, ...)` returns on every rank; functions go by their name."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0, **named: Any) -> Any:
        if not self._processes:
            self._start()
        question = pickle.dumps((function, arguments, named))
        for connection in self._connections:
            connection.send_bytes(question)
        answers = self._collect(timeout_s)
        if all(is_good for is_good, _ in answers.values()) and len(answers) == self.world_size:
            return [answers[rank][1] for rank in range(self.world_size)]
        # Those that are left wait for the others, so none of them is of use any more.
        self.close(patience_s=1.0)
        failed = [f"rank {rank}: {answer}" for rank, (is_good, answer) in answers.items() if not is_good]
        silent = sorted(set(range(self.world_size)) - set(answers))
        raise AssertionError("\n".join(failed) + (f"\nno answer from ranks {silent}" if silent else ""))

    def _start(self) -> None:
        context = _context()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_be_rank, args=(theirs, rank, self.world_size), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        port = self._connections[0].recv()
        for connection in self._connections[1:]:
            connection.send(port)

    def _collect(self, timeout_s: float) -> dict[int, tuple[bool, Any]]:
        """Answers by rank; after the first error the others get a moment to fail by themselves."""
        answers: dict[int, tuple[bool, Any]] = {}
        gone: set[int] = set()
        deadline = time.monotonic() + timeout_s
        while len(answers) + len(gone) < self.world_size and (left_s := deadline - time.monotonic()) > 0:
            open_ones = [c for r, c in enumerate(self._connections) if r not in answers and r not in gone]
            for connection in wait(open_ones, left_s):
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    gone.add(rank)
                if rank in gone or not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + 2.0)
        return answers

    def close(self, patience_s: float = 20.0) -> None:
        """End them. They leave by themselves when nobody asks any more, and write down what they have covered."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.0))
            process.kill()
            process.join()
            process.close()
        self._processes, self._connections = [], []


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed", "torch.nn.parallel", "shoal.train.worker", "tests.many", "tests.forks"]
    )
    return context


def _groups() -> list[Any]:
    """All but those of meshes, which PyTorch remembers beyond a function."""
    return [group for group in dist.distributed_c10d._world.pg_map if not group.group_desc.startswith("mesh")]


def _leave(groups: list[Any]) -> None:
    """What a function has made goes with it: the threads of a thousand groups would leave no time for the next one."""
    gc.collect()
    for group in groups:
        dist.destroy_process_group(group)


def _be_rank(connection: Connection, rank: int, world_size: int) -> None:
    """Answer questions until there is nobody left to ask them."""
    torch.set_num_threads(1)
    os.environ |= network_environment(LOOPBACK, {})
    descriptor = None
    if rank == 0:
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
            descriptor = os.dup(server.fileno())
        connection.send(port)
    else:
        port = connection.recv()
    meeting = Meeting(rank, world_size, LOOPBACK, port, timeout_s=60.0, listen_fd=descriptor)
    with contextlib.suppress(EOFError, ConnectionResetError), joined(meeting, CPU) as group:
        process = Process(rank, world_size, CPU, group, local_rank=rank, local_world_size=world_size)
        while True:
            function, arguments, named = pickle.loads(connection.recv_bytes())
            groups = set(_groups())
            try:
                answer = (True, function(process, *arguments, **named))
            except BaseException:
                answer = (False, traceback.format_exc())
            _leave([made for made in _groups() if made not in groups])
            connection.send_bytes(pickle.dumps(answer))
    os._exit(0)  # nobody waits for those who are still connected
