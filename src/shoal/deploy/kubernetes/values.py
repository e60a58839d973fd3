"""A recipe in terms of the chart: how many pods, and what each of them takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import UserError
from shoal.recipe.schema import Recipe

_PROCESS = 2 << 30
"""Memory of a worker without its tensors: Python, PyTorch and its libraries, CUDA's share of the host."""
_RAY = 2 << 30
"""Of a pod, for Ray's own processes."""
_LOADERS = 4 << 30
"""Of a worker on a GPU, for batches on their way: data loader processes, pinned memory."""
_SPARE = 1.2
"""Memory is foreseen, not known; a pod that takes more is killed."""
_GIB = 1 << 30


@dataclass(frozen=True)
class Need:
    """What a plan says of one worker, in bytes: on its device, and in the host's memory beside it."""

    device: int
    host: int
    on_gpu: bool


@dataclass(frozen=True)
class Machines:
    """What the user says about the machines."""

    gpus_per_machine: int = 8
    cpus: int | None = None
    """Cores of each pod."""


def group_values(recipe: Recipe, need: Need, machines: Machines) -> dict[str, Any]:
    """One group of the chart's `workers` on which the recipe's workers have place, and no more of them."""
    cluster = recipe.cluster
    if (share := cluster.gpus_per_worker) is not None and 0 < share < 1:
        raise UserError(
            f"cluster.gpus_per_worker: {share:g} is part of a GPU, and pods have whole ones; give 1, or deploy a "
            "preset and submit to it with --address"
        )
    each = workers_per_pod(cluster.workers, need.on_gpu, machines)
    least = math.ceil((cluster.min_workers or cluster.workers) / each)
    most = math.ceil(cluster.workers / each)
    memory, shm = pod_memory(need, each)
    values: dict[str, Any] = {
        "minReplicas": least,
        "maxReplicas": most,
        "replicas": least,  # KubeRay starts a job once all of these run; the autoscaler brings the others
        "cpu": machines.cpus or each * (cluster.cpus_per_worker or (8 if need.on_gpu else 2)),
        "memory": f"{memory // _GIB}Gi",
        "shm": f"{shm // _GIB}Gi",
        "gpus": each if need.on_gpu else 0,
    }
    if need.on_gpu:
        values["nodeSelector"] = {"nvidia.com/gpu.present": "true"}
    return values


def workers_per_pod(workers: int, on_gpu: bool, machines: Machines) -> int:
    """How many workers share a pod: those of a machine's GPUs, spread evenly over as few machines as it takes."""
    if not on_gpu:
        return 1
    return math.ceil(workers / math.ceil(workers / machines.gpus_per_machine))


def pod_memory(need: Need, workers: int) -> tuple[int, int]:
    """Bytes of a pod, and of its /dev/shm, which is part of it; whole GiB."""
    if need.on_gpu:
        tensors, shm = need.host + _LOADERS, workers * _LOADERS
    else:
        tensors, shm = need.device + need.host, _GIB + workers * (_GIB // 2)
    shm = math.ceil(shm / _GIB) * _GIB
    total = workers * (tensors + _PROCESS) * _SPARE + _RAY + shm
    return math.ceil(total / _GIB) * _GIB, shm


def workers_values(group: dict[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    """The chart's `workers` with the recipe's group alone: in place of the one of its kind that is there, whose node
    selector and other settings stay; the rest is left out, but for those that lead jobs."""
    kind = bool(group["gpus"])
    train = {name: found for name, found in there.items() if not found.get("leads")}
    own = next((name for name, found in train.items() if bool(found.get("gpus")) == kind), "gpu" if kind else "cpu")
    if "nodeSelector" in (there.get(own) or {}):
        group = {name: value for name, value in group.items() if name != "nodeSelector"}
    return {**dict.fromkeys(train), own: group}
