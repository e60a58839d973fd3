"""Every check of the machine that this runs on, one after the other."""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from shoal.core.machine import usable_cores
from shoal.deploy.doctor import clock, folders, gpus, limits, network, software, surroundings
from shoal.deploy.doctor.devices import Devices, look_at_devices
from shoal.deploy.doctor.finding import Finding, skipped

_RUNS = Path("runs")
_SHM = Path("/dev/shm")  # noqa: S108 - it is looked at


def check_machine(storage: Path | None = None) -> Iterator[Finding]:
    """Where the command runs."""
    devices = look_at_devices()
    yield from check_here(devices, os.environ)
    if storage is None:
        yield folders.judge_run_folder(folders.look_at_folder(_RUNS.absolute()))
    else:
        yield folders.judge_storage_folder(folders.look_at_folder(storage, is_made=False))
    yield from _carefully("ports", lambda: [network.judge_ports(network.look_at_ports())])


def check_here(
    devices: Devices | str, variables: Mapping[str, str], ray_folder: Path | None = None
) -> Iterator[Finding]:
    """What is the same for every machine.

    Args:
        devices: What was seen of GPUs.
        variables: The environment of whoever starts workers here.
        ray_folder: Where a Ray that runs here keeps its files; without it, where one would.
    """
    has_gpu = not isinstance(devices, str) and bool(devices.gpus or devices.device_files)
    checks: dict[str, Callable[[], list[Finding]]] = {
        "python": software.check_software,
        "imports": lambda: gpus.judge_imports(devices),
        "gpu": lambda: gpus.judge_devices(devices),
        "memory": limits.check_limits,
        "shm": lambda: [folders.judge_shm(folders.look_at_folder(_SHM, is_made=False))],
        "ray folder": lambda: [folders.judge_ray_folder(folders.look_at_folder(ray_folder or folders.ray_folder()))],
        "cache folder": lambda: [folders.judge_cache_folder(folders.look_at_folder(folders.cache_folder()))],
        "host name": network.check_names,
        "clock": lambda: [clock.judge_clock(clock.look_at_clock())],
        "variables": lambda: surroundings.judge_variables(variables, usable_cores(), has_gpu, _interfaces()),
        "token": lambda: [surroundings.judge_token(surroundings.look_at_token(variables))],
        "user": lambda: [surroundings.check_user(variables)],
    }
    for name, check in checks.items():
        yield from _carefully(name, check)


def _carefully(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """A sandbox of its own kind may hide what is looked at: that is told, and the other checks go on."""
    try:
        return check()
    except OSError as error:
        return [skipped(name, f"cannot be looked at here: {error}")]


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]
