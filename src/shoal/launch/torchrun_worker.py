"""A worker that torchrun has started for `shoal train --launcher torchrun`, and that talks to that command."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from shoal.core.sessions import end_with_parent
from shoal.launch.nursery import short_address
from shoal.launch.torchrun import Place, listen, my_place


def main() -> int:
    """Connect to the launcher at the socket `sys.argv[1]`, take the job from it, and train."""
    end_with_parent()  # which is torchrun
    place, launcher = my_place(), sys.argv[1]
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        with _connect(launcher, place, stream) as connection:
            os.dup2(connection.fileno(), descriptor)
    messages = _connect(launcher, place, "messages")
    job = _receive(messages)
    listening = listen(place)
    from shoal.launch.trainer import run_trainer

    job["meeting"] |= {"rank": place.rank, "world_size": place.world_size, "host": place.host, "port": place.port}
    job |= {"local_rank": place.local_rank, "local_world_size": place.local_world_size, "agent_pid": os.getppid()}
    job["environment"] = dict(os.environ) | job["environment"]
    return run_trainer(job, messages.detach(), [sys.stderr.fileno(), *([] if listening is None else [listening])])


def _connect(launcher: str, place: Place, stream: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    with short_address(Path(launcher)) as address:
        connection.connect(address)
    hello = {"pid": os.getpid(), "rank": place.rank, "start": place.restarts, "stream": stream}
    connection.sendall((json.dumps(hello) + "\n").encode())
    return connection


def _receive(connection: socket.socket) -> dict[str, Any]:
    """One line and no more: what follows is for the trainer."""
    line = b""
    while not line.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            raise ConnectionError("the launcher is gone")
        line += piece
    job: dict[str, Any] = json.loads(line)
    return job


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
