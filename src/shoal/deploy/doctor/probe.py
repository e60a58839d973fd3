"""What the doctor does on one machine of a cluster: an actor there runs it."""

import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

from shoal.core.version import VERSION
from shoal.deploy.doctor import shared
from shoal.deploy.doctor.devices import Devices, look_at_devices
from shoal.deploy.doctor.machine import check_here
from shoal.deploy.doctor.reduce import RankProcess
from shoal.deploy.doctor.software import version_of
from shoal.deploy.doctor.transfer import Listener, measure
from shoal.launch.environment import network_environment

_SET_BY_RAY = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Which Ray changes for an actor without CPUs."""


class Probe:
    """Methods may be called from several threads. Nothing stays when it is closed or killed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._variables = _variables()
        self._listener: Listener | None = None
        self._lock = shared.Lock()
        self._meeting: socket.socket | None = None
        self._ranks: dict[int, RankProcess] = {}

    def pid(self) -> int:
        """Says that it runs."""
        return os.getpid()

    def now(self) -> float:
        """This machine's clock."""
        return time.time()

    def look(self) -> dict[str, Any]:
        """The checks of this machine, and the versions of what is here."""
        devices = look_at_devices(self._variables)
        return {
            "findings": [finding.to_record() for finding in check_here(devices, self._variables, _ray_folder())],
            "versions": versions(devices),
            "gpus": 0 if isinstance(devices, str) else devices.torch_gpus,
        }

    def listen(self) -> tuple[int, str]:
        """Port and key, by which others measure how they reach this machine."""
        self._listener = Listener(self._address)
        return self._listener.port, self._listener.key

    def measure(self, host: str, port: int, key: str) -> dict[str, Any]:
        """How this machine reaches another."""
        return measure(host, port, key)

    def stop_listening(self) -> None:
        """The port is free again."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def write(self, folder: str, key: str, index: int) -> dict[str, Any]:
        """A file of this machine's own, in storage."""
        return shared.write(folder, key, index)

    def read(self, folder: str, key: str, expected: dict[int, str]) -> dict[str, Any]:
        """What is wrong with the files of the others."""
        return shared.read(folder, key, expected)

    def lock(self, folder: str, key: str) -> str:
        """Take the lock, or say why not."""
        return self._lock.take(folder, key)

    def remove(self, folder: str, key: str, index: int) -> None:
        """Leave nothing in storage."""
        self._lock.drop()
        shared.remove(folder, key, index)

    def open_meeting(self) -> int:
        """The port where the ranks meet; rank 0's process takes it over."""
        self._meeting = socket.create_server((self._address, 0), backlog=4096)
        return int(self._meeting.getsockname()[1])

    def start_ranks(self, jobs: list[dict[str, Any]]) -> None:
        """The ranks of this machine, each a process."""
        environment = self._variables | network_environment(self._address, self._variables)
        for job in jobs:
            listen_fd = self._meeting.fileno() if self._meeting is not None and job["rank"] == 0 else None
            self._ranks[job["rank"]] = RankProcess(job, environment, listen_fd)
        self._close_meeting()

    def ranks(self) -> dict[int, dict[str, Any]]:
        """How far they are."""
        return {rank: process.state() for rank, process in self._ranks.items()}

    def end_ranks(self) -> None:
        """End them."""
        self._close_meeting()
        for process in self._ranks.values():
            process.close()
        self._ranks.clear()

    def _close_meeting(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None

    def close(self) -> None:
        """End all that was started here."""
        self.end_ranks()
        self.stop_listening()
        self._lock.drop()


def versions(devices: Devices | str) -> dict[str, str]:
    """Of what must be, or should be, the same on all machines."""
    found = {"Python": platform.python_version(), "Shoal": VERSION}
    found |= {name: version_of(package) or "none" for name, package in (("torch", "torch"), ("Ray", "ray"))}
    if not isinstance(devices, str):
        more = {"NCCL": devices.nccl, "CUDA": devices.torch_cuda, "driver": devices.driver}
        found |= {name: version for name, version in more.items() if version is not None}
    return found


def _ray_folder() -> Path | None:
    """Where the Ray that has started this actor keeps its files: it is told by `ray start`, or by the head."""
    ray: Any = sys.modules.get("ray")
    return Path(ray.get_runtime_context().get_temp_dir()) if ray is not None and ray.is_initialized() else None


def _variables() -> dict[str, str]:
    """The environment that workers are started with: this actor's, without what Ray has changed for it."""
    found = dict(os.environ)
    parent = Path(f"/proc/{os.getppid()}")
    try:
        is_raylet = (parent / "comm").read_text().strip() == "raylet"
        lines = (parent / "environ").read_bytes().decode(errors="replace").split("\0") if is_raylet else []
    except OSError:  # hidden from us
        lines = []
    if not lines:
        return found
    of_raylet = dict(line.split("=", 1) for line in lines if "=" in line)
    for name in _SET_BY_RAY:
        found.pop(name, None)
        if name in of_raylet:
            found[name] = of_raylet[name]
    return found
