"""Workers on Ray: a cluster that runs, or one that is started here for the time of the run."""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.core.errors import UserError
from shoal.core.machine import usable_cores
from shoal.core.ray_connection import has_token, host_and_port, is_loopback, ray_settings, why_silent
from shoal.core.secrets import scrub
from shoal.data.section import CustomData
from shoal.launch.environment import QUIET_RAY
from shoal.launch.local import check_shared, threads_of
from shoal.launch.nursery import Nursery, new_nursery_name
from shoal.launch.policy import Size
from shoal.launch.run import Launch, Prepared
from shoal.recipe.schema import Recipe
from shoal.tasks.section import CustomTask

_FOR_US = {signal.SIGTERM, signal.SIGHUP}
_FORMS = "auto, HOST:PORT or ray://HOST:PORT"


def run_on_ray(prepared: Prepared, how: Launch) -> dict[str, Any]:
    """Train on Ray and return the summary."""
    from shoal.launch.gang import Gang

    cluster = prepared.loaded.recipe.cluster
    size = Size(cluster.min_workers or cluster.workers, cluster.workers)
    is_own = how.address is None and not _is_initialized()
    check_address(how.address)
    if is_own:
        _check_machine(prepared)
    nursery = new_nursery_name()
    # On this machine already now: torch is imported while Ray starts.
    warm = Nursery(nursery) if how.address in (None, "auto") or is_here(how.address) else None
    where = f"Ray at {scrub(how.address)}" if how.address else "Ray"
    how.console.event("starting", {"what": f"{'starting' if is_own else 'connecting to'} {where}"})
    with contextlib.ExitStack() as stack:
        if warm is not None:
            stack.callback(warm.close)
        readers = readers_of(prepared.loaded.recipe)
        ray, dashboard_url = stack.enter_context(connected(cluster.workers, how, readers))
        how.mark("connected")
        from shoal.launch.ray_crew import RayCrew  # not before: importing Ray fixes its settings

        cpus = cluster.cpus_per_worker or (threads_of(prepared) if is_own else 1)
        threads = cluster.threads_per_worker or cpus
        gpus = cluster.gpus_per_worker
        if gpus is None:  # GPUs where the cluster has enough of them
            gpus = int(ray.cluster_resources().get("GPU", 0) >= size.least)
        elif is_own and gpus * cluster.workers > (there := ray.cluster_resources().get("GPU", 0)):
            raise UserError(
                f"cluster.gpus_per_worker: {cluster.workers} workers need {gpus * cluster.workers:g} GPU and this "
                f"machine has {there:g}; leave out --gpu, or start fewer workers"
            )
        crew = RayCrew(size, {"CPU": float(cpus), "GPU": float(gpus)}, nursery)
        try:
            if dashboard_url:
                how.console.event("dashboard", {"url": f"http://{dashboard_url}"})
            return Gang(prepared, how, crew, size, threads).run()
        finally:
            crew.close()


def check_address(address: str | None) -> None:
    """Refuse what cannot be the address of a cluster."""
    if address is not None and "://" in address and not address.startswith("ray://"):
        raise UserError(f"--address: {scrub(address)!r} should be {_FORMS}; http:// addresses are for shoal submit")
    if address not in (None, "auto") and not host_and_port(address)[1]:
        raise UserError(f"--address: {scrub(address)!r} should be {_FORMS}")


def _check_machine(prepared: Prepared) -> None:
    """Refuse what this machine alone has too little for, before anything is started."""
    cluster, cores = prepared.loaded.recipe.cluster, usable_cores()
    if cluster.cpus_per_worker and cluster.cpus_per_worker * cluster.workers > cores:
        needed = cluster.cpus_per_worker * cluster.workers
        raise UserError(
            f"cluster.cpus_per_worker: {cluster.workers} workers need {needed} CPU and this machine has {cores}; "
            "ask for fewer, or leave it out to share the cores"
        )
    check_shared(cluster.workers, cores)


def _is_initialized() -> bool:
    """Whether the program that calls Shoal has connected to a Ray, whose business it stays."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


@contextlib.contextmanager
def connected(workers: int, how: Launch, readers: int = 0) -> Iterator[tuple[Any, str | None]]:
    """Ray, connected to the cluster that was asked for, and where its dashboard is; what began here ends with it.

    `readers`: processes that read data beside the workers, for which a Ray of our own must have room.
    """
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    host, port = host_and_port(how.address)
    # Where a Ray of our own stays.
    on_loopback = how.address is None or is_loopback(host)
    if how.address is None and not how.dashboard:
        settings |= QUIET_RAY
    if port:
        _check_answers(how.address, host, port)
    if how.address is not None and has_token():
        settings["RAY_AUTH_MODE"] = "token"  # connecting, Ray does not always look for it by itself
    with ray_settings(settings, on_loopback=on_loopback):
        ray, context = _ray(workers, how, readers)
    try:
        yield ray, getattr(context, "dashboard_url", None)
    finally:
        if context is not None:
            _shut_down(ray, is_own=how.address is None)


def is_here(address: str) -> bool:
    """Whether a cluster's address is one of this machine's own, which then is likely to train."""
    host, port = host_and_port(address)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return port is not None


def _check_answers(address: str | None, host: str, port: int) -> None:
    if reason := why_silent(host, port):
        raise _no_cluster(address, reason)


def _no_cluster(address: str | None, reason: str) -> UserError:
    at = None if address is None else scrub(address)
    return UserError(
        f"--address: no Ray cluster answers at {at!r} ({reason}); start one with ray start --head, or leave this out"
    )


def _ray(workers: int, how: Launch, readers: int) -> tuple[Any, Any]:
    """Ray, and what `ray.init` returned, if it was called here."""
    try:
        import ray
    except ImportError as error:
        raise UserError(f"--launcher: ray needs Ray: pip install 'ray[default]' ({error})") from error

    if _is_initialized():
        return ray, None
    quiet = {"log_to_driver": how.verbose, "logging_level": "INFO" if how.verbose else "CRITICAL"}
    if how.address is None:
        with _without_idle_parts(how):
            return ray, _start(ray, workers, readers, how.dashboard, quiet)
    return ray, _connect(ray, how.address, quiet)


def readers_of(recipe: Recipe) -> int:
    """Processes that will read data on the cluster: as many as the recipe says, or one for a Ray Dataset that a user's
    own code may bring."""
    data = recipe.data
    if data is not None and data.loader == "ray":
        each = data.workers if isinstance(data.workers, int) else 2
        return (max(1, each) + 1) * recipe.cluster.workers  # one of validation besides
    is_own_code = isinstance(recipe.task, CustomTask) or isinstance(data, CustomData)
    return int(is_own_code and (data is None or data.loader == "auto"))


def _start(ray: Any, workers: int, readers: int, dashboard: bool, quiet: dict[str, Any]) -> Any:
    # Ray's processes are in our process group: a SIGTERM to all of it, or a closed terminal, is ours to answer.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_US)
    try:
        return ray.init(
            address="local",
            num_cpus=max(usable_cores(), workers) + readers,
            include_dashboard=dashboard,
            dashboard_host="127.0.0.1",
            # Nobody else has a business with this Ray.
            _node_ip_address="127.0.0.1",
            object_store_memory=(512 if readers else 128) << 20,
            **quiet,
        )
    except Exception as error:  # a bare one too, where a busy machine is too slow for Ray's own limits
        raise UserError(f"--launcher: Ray does not start here: {error}; try again, or --launcher local") from error
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_US)


@contextlib.contextmanager
def _without_idle_parts(how: Launch) -> Iterator[None]:
    """Start Ray without the processes that only watch, and without the one port that every Ray asks for.

    Nobody would ask what they see, and they take from the start and from the training. Where another Ray of this
    machine has the port of the dashboard's agent, or had it a second ago, Ray would try it again for four seconds.
    """
    from ray._private.node import Node

    def leave_out(node: Any, **options: Any) -> None:
        node._ray_params.dashboard_agent_listen_port = 0  # any that is free

    unwanted = {"start_monitor": True, "start_api_server": not how.dashboard, "start_log_monitor": not how.verbose}
    originals = {name: getattr(Node, name) for name, is_unwanted in unwanted.items() if is_unwanted}
    for name in originals:
        setattr(Node, name, leave_out)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Node, name, original)


def _shut_down(ray: Any, is_own: bool) -> None:
    """Disconnect, and end a Ray that was started here.

    Its processes hold back the SIGTERM by which Ray would end them, and Ray gives each a second before it kills it.
    What the raylet has started may take a minute to see that it is gone.
    """
    node = ray._private.worker._global_node
    if is_own and node is not None:
        raylets = node.all_processes.get("raylet", [])
        kill_all = node.kill_all_processes

        def kill_at_once(**options: Any) -> None:
            started = [child for raylet in raylets for child in _children(raylet.process.pid)]
            kill_all(**options | {"allow_graceful": False})
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        node.kill_all_processes = kill_at_once
    ray.shutdown()


def _children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def _connect(ray: Any, address: str, quiet: dict[str, Any]) -> Any:
    try:
        # What Ray would find: one that ran here and no longer answers would be tried for minutes.
        found = ray._private.services.canonicalize_bootstrap_address(address) if address == "auto" else None
    except ConnectionError as error:
        raise _no_cluster(address, "none runs on this machine, and RAY_ADDRESS is not set") from error
    host, port = host_and_port(found)
    if port:
        _check_answers(f"auto, which is {found}", host, port)
    try:
        return ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise _no_cluster(address, next(iter(str(error).strip().splitlines()), type(error).__name__)) from error
