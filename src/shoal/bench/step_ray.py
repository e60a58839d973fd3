"""Shoal in a worker on Ray, in `shoal bench step --peers --launcher ray`: an actor of a Ray of its own trains, where a
run with one worker would have it, with as many threads."""

import os
from pathlib import Path
from typing import Any

from shoal.launch.environment import QUIET_RAY
from shoal.launch.local import threads_of
from shoal.launch.on_ray import connected
from shoal.launch.run import Launch, Prepared
from shoal.observe.console import SilentConsole
from shoal.recipe.load import LoadedRecipe


class Trainer:
    """What Ray has in its worker."""

    def train(self, job: dict[str, Any], folder: str) -> int:
        """Be the contender; the exit status."""
        from shoal.bench.step_worker import serve

        for name, value in QUIET_RAY.items():  # meant for Ray, as where runs are trained
            if os.environ.get(name) == value:
                del os.environ[name]
        return serve(job, Path(folder))


def train_on_ray(loaded: LoadedRecipe, job: dict[str, Any], folder: Path) -> int:
    """Have one worker of a Ray that is started here train, until nobody asks for another turn; the exit status."""
    cluster = loaded.recipe.cluster
    with connected(1, Launch(SilentConsole(), launcher="ray")) as (ray, _):
        cpus = threads_of(Prepared(loaded, folder))
        gpus = cluster.gpus_per_worker
        if gpus is None:
            gpus = int(ray.cluster_resources().get("GPU", 0) >= 1)
        actor = ray.remote(Trainer).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0).remote()
        own = job | {"threads": cluster.threads_per_worker or cpus}
        status: int = ray.get(actor.train.remote(own, str(folder)))
        return status
