"""Workers on Ray: a cluster that runs, or one that is started here for the time of the run."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from shoal.core.errors import UserError
from shoal.launch.local import threads_of
from shoal.launch.nursery import Nursery, new_nursery_name
from shoal.launch.policy import Size
from shoal.launch.run import Launch, Prepared
from shoal.launch.sizes import usable_cores


def run_on_ray(prepared: Prepared, how: Launch) -> dict[str, Any]:
    """Train on Ray and return the summary."""
    from shoal.launch.gang import Gang
    from shoal.launch.ray_crew import RayCrew

    cluster = prepared.loaded.recipe.cluster
    size = Size(cluster.min_workers or cluster.workers, cluster.workers)
    is_own = how.address is None
    nursery = new_nursery_name()
    # On this machine already now: torch is imported while Ray starts.
    warm = Nursery(nursery) if how.address in (None, "auto") else None
    with contextlib.ExitStack() as stack:
        if warm is not None:
            stack.callback(warm.close)
        ray = stack.enter_context(connected(prepared, how))
        cpus = cluster.cpus_per_worker or (threads_of(prepared) if is_own else 1)
        threads = cluster.threads_per_worker or cpus
        gpus = cluster.gpus_per_worker
        if gpus is None:  # GPUs where the cluster has enough of them
            gpus = int(ray.cluster_resources().get("GPU", 0) >= size.least)
        crew = RayCrew(size, {"CPU": float(cpus), "GPU": float(gpus)}, nursery)
        try:
            if url := dashboard_url(ray):
                how.console.event("dashboard", {"url": url})
            return Gang(prepared, how, crew, size, threads).run()
        finally:
            crew.close()


@contextlib.contextmanager
def connected(prepared: Prepared, how: Launch) -> Iterator[Any]:
    """Ray, connected to the cluster that was asked for; what was started or connected here ends with it."""
    # A Ray of our own stays on the loopback interface. Ray looks at this variable when it is imported.
    own = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if how.address is None else {}
    with _environment(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", **own):
        ray, is_ours = _ray(prepared, how)
    try:
        yield ray
    finally:
        if is_ours:
            ray.shutdown()


def _ray(prepared: Prepared, how: Launch) -> tuple[Any, bool]:
    """Ray, and whether it was started or connected here."""
    try:
        import ray
    except ImportError as error:
        raise UserError(f"--launcher: ray needs Ray: pip install 'ray[default]' ({error})") from error

    if ray.is_initialized():  # by the program that calls Shoal, whose business it stays
        return ray, False
    quiet = {"log_to_driver": how.verbose, "logging_level": "INFO" if how.verbose else "CRITICAL"}
    if how.address is None:
        _start(ray, prepared, how.dashboard, quiet)
    else:
        _connect(ray, how.address, quiet)
    return ray, True


def _start(ray: Any, prepared: Prepared, dashboard: bool, quiet: dict[str, Any]) -> None:
    cluster = prepared.loaded.recipe.cluster
    cores = usable_cores()
    if cluster.cpus_per_worker and cluster.cpus_per_worker * cluster.workers > cores:
        needed = cluster.cpus_per_worker * cluster.workers
        raise UserError(
            f"cluster.cpus_per_worker: {cluster.workers} workers need {needed} CPU and this machine has {cores}; "
            "ask for fewer, or leave it out to share the cores"
        )
    try:
        ray.init(
            address="local",
            num_cpus=max(cores, cluster.workers),
            include_dashboard=dashboard,
            dashboard_host="127.0.0.1",
            # Nobody else has a business with this Ray.
            _node_ip_address="127.0.0.1",
            object_store_memory=128 << 20,
            **quiet,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"--launcher: Ray does not start here: {error}; try --launcher local") from error


def _connect(ray: Any, address: str, quiet: dict[str, Any]) -> None:
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"--address: no Ray cluster answers at {address!r} ({reason}); start one with ray start --head, "
            "or leave this out to start one for this run"
        ) from error


def dashboard_url(ray: Any) -> str | None:
    """Where Ray's dashboard is, if it runs."""
    with contextlib.suppress(AttributeError):  # not known to a Ray client
        url = ray._private.worker.get_dashboard_url()
        return f"http://{url}" if url else None
    return None


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Variables that Ray reads when it starts, unless the user has set them."""
    fresh = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(fresh)
    try:
        yield
    finally:
        for name in fresh:
            os.environ.pop(name, None)
