"""Whether a cluster has room for a recipe's workers, before any is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.launch.on_ray import check_address, connected
from shoal.launch.policy import missing_resources, num_fitting
from shoal.launch.run import Launch
from shoal.observe.console import SilentConsole
from shoal.recipe.schema import ClusterSection, Recipe


@dataclass(frozen=True)
class Room:
    """What a cluster has for workers of one size."""

    per_worker: dict[str, float]
    machines: int
    workers: int
    """How many of them the machines have place for when nobody else uses them."""
    free: int
    """For how many of them there may be place now: Ray tells what is free in sum, not by machine."""
    obstacle: str | None
    """What the cluster lacks for as many as the recipe wants."""

    def to_record(self) -> dict[str, Any]:
        """For JSON."""
        facts = {"per_worker": self.per_worker, "machines": self.machines, "workers_at_most": self.workers}
        return facts | {"workers_now": self.free, "fits": self.obstacle is None, "obstacle": self.obstacle}


def room_on(address: str, recipe: Recipe) -> Room:
    """Ask the cluster at `address` what it has for a recipe's workers; nothing is started there."""
    check_address(address)
    cluster = recipe.cluster
    with connected(cluster.workers, Launch(SilentConsole(), address=address)) as (ray, _):
        from shoal.launch.ray_crew import alive_nodes  # not before: importing Ray fixes its settings

        nodes = alive_nodes()
        free = ray.available_resources()
    per_worker = size_of_worker(cluster, nodes)
    useful = [node for node in nodes if num_fitting(per_worker, [node])]
    least = cluster.min_workers or cluster.workers
    at_most = num_fitting(per_worker, useful)
    return Room(
        per_worker=per_worker,
        machines=len(useful),
        workers=at_most,
        free=min(at_most, num_fitting(per_worker, [free])),
        obstacle=missing_resources(per_worker, least, nodes),
    )


def size_of_worker(cluster: ClusterSection, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What a worker of a run on these machines asks for: a GPU, unless the recipe says, where there are enough."""
    gpus = cluster.gpus_per_worker
    if gpus is None:
        gpus = int(sum(node.get("GPU", 0) for node in nodes) >= (cluster.min_workers or cluster.workers))
    sizes = {"CPU": float(cluster.cpus_per_worker or 1), "GPU": float(gpus)}
    return {name: amount for name, amount in sizes.items() if amount}
