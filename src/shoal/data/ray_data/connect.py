"""A worker's connection to Ray, and what the cluster has room for."""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from shoal.core.errors import UserError
from shoal.core.ray_connection import (
    RUNTIME_ENV,
    has_token,
    host_and_port,
    is_loopback,
    ray_settings,
    signals_kept,
    why_silent,
)
from shoal.data.ray_data.travel import last_line

NAMESPACE = "shoal-data"
GROWS_WITHIN_S = 900.0
"""How long a cluster with an autoscaler may take to bring machines."""
ROOM_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.5
_NO_CLUSTER = "data.loader: ray needs a Ray cluster: --launcher ray or --address"


class _Connection:
    """How many users this process's connection to Ray has, where it was made here."""

    lock = threading.Lock()
    users = 0
    is_ours = False


@contextlib.contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """Ray, connected; what was connected here is let go by the last who uses it.

    A program's own connection is used where there is one, else the cluster at `address`, else the one that
    `RAY_ADDRESS` names. No cluster is ever started: it would be one for each worker.
    """
    with _Connection.lock:
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            ray = _connect(_address(address))
            _Connection.users, _Connection.is_ours = 0, True
        _Connection.users += 1
    try:
        yield ray
    finally:
        with _Connection.lock:
            _Connection.users -= 1
            if not _Connection.users and _Connection.is_ours:
                _Connection.is_ours = False
                with signals_kept():
                    ray.shutdown()


def _address(address: str | None) -> str:
    found = address or os.environ.get("RAY_ADDRESS")
    if not found:
        raise UserError(_NO_CLUSTER)
    if "://" in found:
        raise UserError(f"data.loader: ray reads over an address like HOST:PORT, not {found!r}; use --launcher ray")
    return found


def _connect(address: str) -> Any:
    host, port = host_and_port(address)
    if port and (reason := why_silent(host, port)):
        raise UserError(f"{_NO_CLUSTER}; nobody answers at {address} ({reason})")
    settings = {"RAY_USAGE_STATS_ENABLED": "0"} | ({"RAY_AUTH_MODE": "token"} if has_token() else {})
    with ray_settings(settings, on_loopback=is_loopback(host)):
        import ray  # not before: importing Ray fixes its settings

        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL"}
        try:
            brought = json.loads(os.environ.get(RUNTIME_ENV, "null"))
            ray.init(address=address, namespace=NAMESPACE, runtime_env=brought, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise UserError(f"{_NO_CLUSTER}; {address} does not let us in: {last_line(error)}") from error
    return ray


def grows(ray: Any) -> bool:
    """Whether the cluster has an autoscaler; there is no public way to ask."""
    return bool(ray._private.state.state.get_cluster_config())


def no_room(ray: Any, cpus: float, why: str = "") -> UserError:
    """What to tell when nothing can start."""
    free, there = ray.available_resources().get("CPU", 0.0), ray.cluster_resources().get("CPU", 0.0)
    return UserError(
        f"data.loader: the cluster has no room for a reader of {cpus:g} CPU: {free:g} of {there:g} CPU are free"
        f"{why and '; the last one could not start: ' + why}. Add machines, which need no GPU, or leave some CPUs to "
        "the readers: fewer workers, or a smaller cluster.cpus_per_worker"
    )


def await_room(ray: Any, cpus: float = 1.0) -> None:
    """Wait until something could run: Ray Data would wait for ever, without a word."""
    began, most_s = time.monotonic(), None
    while ray.available_resources().get("CPU", 0.0) < cpus:
        if most_s is None:
            most_s = GROWS_WITHIN_S if grows(ray) else ROOM_WITHIN_S
        if time.monotonic() - began > most_s:
            raise no_room(ray, cpus)
        time.sleep(_LOOK_EVERY_S)
