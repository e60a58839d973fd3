"""Workers on this machine: one right here, in this process, or several in processes of their own."""

from typing import Any

from shoal.core.errors import UserError
from shoal.core.machine import usable_cores
from shoal.launch.run import Launch, Prepared

_MOST_A_CORE = 4


def run_here(prepared: Prepared, how: Launch) -> dict[str, Any]:
    """Train in this process."""
    import contextlib

    from shoal.core.group import Group, Meeting, joined
    from shoal.core.process import Process, choose_device
    from shoal.train.request import RunRequest
    from shoal.train.worker import train_worker

    how.enter("building")
    recipe = prepared.loaded.recipe
    device = choose_device(recipe.cluster.gpus_per_worker)
    request = RunRequest(
        loaded=prepared.loaded,
        run_dir=prepared.run_dir,
        console=how.console,
        resume=prepared.resume,
        stop=how.stop,
        on_first_step=lambda: how.enter("training"),
        started=how.started,
        marks=how.marks,
        pause_at=how.pause_at,
        launch=how.asked,
    )
    group: contextlib.AbstractContextManager[Group] = contextlib.nullcontext(Group())
    if recipe.parallel.strategy not in ("auto", "single"):  # a group of one, for those who ask for it
        meeting = Meeting(rank=0, world_size=1, host="", port=0, timeout_s=recipe.failures.hang_timeout_s)
        group = joined(meeting, device, recipe.parallel.backend)
    with group as joined_group:
        return train_worker(request, Process(rank=0, world_size=1, device=device, group=joined_group))


def run_workers_here(prepared: Prepared, how: Launch) -> dict[str, Any]:
    """Train in several processes on this machine, without Ray."""
    from shoal.launch.crew import LocalCrew
    from shoal.launch.gang import Gang
    from shoal.launch.policy import Size

    cluster = prepared.loaded.recipe.cluster
    if cluster.min_workers is not None:
        raise UserError("cluster.min_workers: machines come and go on Ray; with --launcher local give one number")
    check_shared(cluster.workers, usable_cores())
    crew = LocalCrew(cluster.workers)
    try:
        return Gang(prepared, how, crew, Size(cluster.workers, cluster.workers), threads_of(prepared)).run()
    finally:
        crew.close()


def threads_of(prepared: Prepared) -> int:
    """CPU threads of each worker, where all are on this machine: what it is given, or an equal share."""
    cluster = prepared.loaded.recipe.cluster
    return cluster.threads_per_worker or cluster.cpus_per_worker or max(1, usable_cores() // cluster.workers)


def check_shared(workers: int, cores: int) -> None:
    """Refuse so many workers on one machine that they would only wait for each other."""
    if workers > _MOST_A_CORE * cores:
        raise UserError(
            f"cluster.workers: {workers} workers on the {cores} cores of this machine would wait for each other; "
            f"start at most {_MOST_A_CORE * cores}, or use a cluster with --address"
        )
