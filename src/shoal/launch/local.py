"""The launcher that starts no process: the worker runs right here."""

from typing import Any

from shoal.core.process import Process, choose_device
from shoal.launch.run import Launch, Prepared
from shoal.train.worker import RunRequest, train_worker


def run_here(prepared: Prepared, how: Launch) -> dict[str, Any]:
    """Train in this process."""
    process = Process(rank=0, world_size=1, device=choose_device(prepared.loaded.recipe.cluster.gpus_per_worker))
    request = RunRequest(
        loaded=prepared.loaded,
        run_dir=prepared.run_dir,
        console=how.console,
        resume=prepared.resume,
        stop=how.stop,
        started=how.started,
    )
    return train_worker(request, process)
