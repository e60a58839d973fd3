"""A recipe in terms of the chart: how many pods, and what each of them takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import UserError
from shoal.deploy.kubernetes.chart import Group
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
_GPUS = 8
"""Of a machine of which nothing is known."""
_CPUS = 2
"""Cores of a worker on CPUs, where nobody says how many."""
_CPUS_OF_GPU = 8
"""Of one with a GPU."""


@dataclass(frozen=True)
class Need:
    """What a plan says of one worker, in bytes: on its device, and in the host's memory beside it."""

    device: int
    host: int
    on_gpu: bool


@dataclass(frozen=True)
class Machines:
    """What the user says about the machines."""

    gpus_per_machine: int | None = None
    """None: as many as the group has that is installed."""
    cpus: int | None = None
    """Cores of each pod."""


def own_group(need: Need, there: Mapping[str, Group]) -> str:
    """The group in whose place the recipe's workers come: the first of their kind, or a new one."""
    kind = "gpu" if need.on_gpu else "cpu"
    return next((name for name, group in there.items() if not group.leads and bool(group.gpus) == need.on_gpu), kind)


def group_values(recipe: Recipe, need: Need, machines: Machines, own: Group | None = None) -> dict[str, Any]:
    """One group of the chart's `workers` on which the recipe's workers have place, and no more of them.

    Args:
        own: The group that it takes the place of, whose machines are known.
    """
    cluster = recipe.cluster
    if (share := cluster.gpus_per_worker) is not None and 0 < share < 1:
        raise UserError(
            f"cluster.gpus_per_worker: {share:g} is part of a GPU, and pods have whole ones; give 1, or deploy a "
            "preset and submit to it with --address"
        )
    gpus = machines.gpus_per_machine or (own.gpus if own is not None else 0) or _GPUS
    each = workers_per_pod(cluster.workers, need.on_gpu, gpus)
    least = math.ceil((cluster.min_workers or cluster.workers) / each)
    most = math.ceil(cluster.workers / each)
    memory, shm = pod_memory(need, each)
    values: dict[str, Any] = {
        "minReplicas": least,
        "maxReplicas": most,
        "replicas": least,  # KubeRay starts a job once all of these run; the autoscaler brings the others
        "cpu": machines.cpus or _cores(each, cluster.cpus_per_worker, need.on_gpu, own),
        "memory": f"{memory // _GIB}Gi",
        "shm": f"{shm // _GIB}Gi",
        "gpus": each if need.on_gpu else 0,
    }
    if need.on_gpu:
        values["nodeSelector"] = {"nvidia.com/gpu.present": "true"}
    return values


def _cores(workers: int, asked: int | None, on_gpu: bool, own: Group | None) -> float:
    """Of a pod: what the recipe asks for, or what is usual where its machines have that much."""
    if asked is not None:
        return workers * asked
    usual = workers * (_CPUS_OF_GPU if on_gpu else _CPUS)
    return min(usual, own.cpu) if own is not None else usual


def too_large(group: Mapping[str, Any], name: str, own: Group | None) -> list[str]:
    """What the pods of a group take beyond those that are installed, in words: they may find no place."""
    if own is None:
        return []
    memory = int(group["memory"].removesuffix("Gi")) * _GIB
    found = [
        f"its pods take {mine}, and those of the group {name!r} {theirs}: they may find no machine; {advice}"
        for is_more, mine, theirs, advice in (
            (group["gpus"] > own.gpus, f"{group['gpus']} GPUs", f"{own.gpus}", "see --gpus-per-machine"),
            (group["cpu"] > own.cpu, f"{group['cpu']:g} cores", f"{own.cpu:g}", "see --cpus, cluster.cpus_per_worker"),
            (memory > own.memory, group["memory"], f"{own.memory / _GIB:g}Gi", "shoal plan tells what takes it"),
        )
        if is_more
    ]
    return found


def workers_per_pod(workers: int, on_gpu: bool, gpus_per_machine: int) -> int:
    """How many workers share a pod: those of a machine's GPUs, spread evenly over as few machines as it takes."""
    if not on_gpu:
        return 1
    return math.ceil(workers / math.ceil(workers / gpus_per_machine))


def pod_memory(need: Need, workers: int) -> tuple[int, int]:
    """Bytes of a pod, and of its /dev/shm, which is part of it; whole GiB."""
    if need.on_gpu:
        tensors, shm = need.host + _LOADERS, workers * _LOADERS
    else:
        tensors, shm = need.device + need.host, _GIB + workers * (_GIB // 2)
    shm = math.ceil(shm / _GIB) * _GIB
    total = workers * (tensors + _PROCESS) * _SPARE + _RAY + shm
    return math.ceil(total / _GIB) * _GIB, shm


def workers_values(group: dict[str, Any], own: str, there: Mapping[str, Group]) -> dict[str, Any]:
    """The chart's `workers` with the recipe's group alone: in place of the one called `own`, whose node selector and
    other settings stay; the rest is left out, but for those that lead jobs."""
    train = [name for name, found in there.items() if not found.leads]
    if own in there and there[own].has_selector:
        group = {name: value for name, value in group.items() if name != "nodeSelector"}
    return {**dict.fromkeys(train), own: group}
