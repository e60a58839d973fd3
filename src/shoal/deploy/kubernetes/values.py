"""A recipe in terms of the chart: how many pods, and what each of them takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import UserError
from shoal.deploy.kubernetes.chart import Group
from shoal.launch.on_ray import readers_of
from shoal.recipe.schema import Recipe

_GIB = 1 << 30
_PROCESS, _PROCESS_OF_GPU = _GIB, 2 * _GIB
"""Memory of a worker without its tensors, and of the one that waits to take its place: Python, PyTorch and its
libraries, CUDA's share of the host."""
_RAY, _RAY_OF_GPU = _GIB, 2 * _GIB
"""Of a pod, for Ray's own processes."""
_SHM = _GIB
"""Of a worker, for what data loader processes and Ray's store hand over."""
_LOADERS = 4 * _GIB
"""Of a worker on a GPU, for batches on their way: data loader processes, pinned memory."""
_SPARE = 1.2
"""Memory is foreseen, not known; a pod that takes more is killed."""
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


def own_group(recipe: Recipe, there: Mapping[str, Group]) -> str:
    """The group in whose place the recipe's workers come: the first of their kind, or a new one."""
    on_gpu = bool(recipe.cluster.gpus_per_worker)
    return next(
        (name for name, group in there.items() if not group.leads and bool(group.gpus) == on_gpu),
        "gpu" if on_gpu else "cpu",
    )


def group_values(recipe: Recipe, need: Need | None, machines: Machines, own: Group | None = None) -> dict[str, Any]:
    """One group of the chart's `workers` on which the recipe's workers have place, and no more of them.

    Args:
        need: None where it is not known: then pods have the memory of `own`.
        own: The group that it takes the place of, whose machines are known.
    """
    cluster = recipe.cluster
    if (share := cluster.gpus_per_worker) is not None and 0 < share < 1:
        raise UserError(
            f"cluster.gpus_per_worker: {share:g} is part of a GPU, and pods have whole ones; give 1, or deploy a "
            "preset and submit to it with --address"
        )
    gpus = machines.gpus_per_machine or (own.gpus if own is not None else 0) or _GPUS
    on_gpu = bool(share)
    each = workers_per_pod(cluster.workers, on_gpu, gpus)
    least = math.ceil((cluster.min_workers or cluster.workers) / each)
    most = math.ceil(cluster.workers / each)
    asked = each * _asked_of_ray(recipe)
    if machines.cpus is not None and machines.cpus < asked:
        raise UserError(
            f"--cpus: {machines.cpus} is too few: a pod has {each} of the workers, which ask Ray for {asked} cores "
            f"(cluster.cpus_per_worker, readers of data.loader=ray); give {asked} or more"
        )
    values: dict[str, Any] = {
        "minReplicas": least,
        "maxReplicas": most,
        "replicas": least,  # KubeRay starts a job once all of these run; the autoscaler brings the others
        "cpu": machines.cpus or _cores(each, asked, cluster.cpus_per_worker is not None, on_gpu, own),
        "gpus": each if on_gpu else 0,
    }
    if need is not None:
        memory, shm = pod_memory(need, each)
        values |= {"memory": f"{memory // _GIB}Gi", "shm": f"{shm // _GIB}Gi"}
    if on_gpu:
        values["nodeSelector"] = {"nvidia.com/gpu.present": "true"}
    return values


def _asked_of_ray(recipe: Recipe) -> int:
    """Cores without which Ray has no place for a worker: its own, and those of what reads for it on the cluster."""
    is_read_by_ray = recipe.data is not None and recipe.data.loader == "ray"
    readers = readers_of(recipe) // recipe.cluster.workers if is_read_by_ray else 0
    return (recipe.cluster.cpus_per_worker or 1) + readers


def _cores(workers: int, asked: int, is_said: bool, on_gpu: bool, own: Group | None) -> float:
    """Of a pod: what its workers ask for where the recipe says so; otherwise what is usual, as far as its machines
    have that much. Ray counts a part of a core as a whole one."""
    usual = workers * (_CPUS_OF_GPU if on_gpu else _CPUS)
    if is_said:
        return asked
    if own is None:
        return max(asked, usual)
    return own.cpu if asked <= math.ceil(own.cpu) <= usual else max(asked, min(usual, own.cpu))


def too_large(group: Mapping[str, Any], name: str, own: Group | None) -> list[str]:
    """What the pods of a group take beyond those that are installed, in words: they may find no place."""
    if own is None:
        return []
    memory = _memory_of(group, own)
    found = [
        f"its pods take {mine}, and those of the group {name!r} {theirs}: they may find no machine; {advice}"
        for is_more, mine, theirs, advice in (
            (group["gpus"] > own.gpus, f"{group['gpus']} GPUs", f"{own.gpus}", "see --gpus-per-machine"),
            (group["cpu"] > own.cpu, f"{group['cpu']:g} cores", f"{own.cpu:g}", "see --cpus, cluster.cpus_per_worker"),
            (memory > own.memory, f"{memory / _GIB:g}Gi", f"{own.memory / _GIB:g}Gi", "shoal plan tells what takes it"),
        )
        if is_more
    ]
    return found


def _memory_of(group: Mapping[str, Any], own: Group | None) -> int:
    """Bytes of each pod of a group; where it says nothing of them, it has those of the one in whose place it comes."""
    if "memory" in group:
        return int(group["memory"].removesuffix("Gi")) * _GIB
    return own.memory if own is not None else 0


def over_quota(workers: Mapping[str, Mapping[str, Any] | None], there: Mapping[str, Group]) -> list[str]:
    """What a job's workers take beyond what the chart's quota counts for one, in words: pods would not be made."""
    mine = [
        (group["maxReplicas"], {**group, "memory": _memory_of(group, there.get(name))})
        for name, group in workers.items()
        if group is not None
    ]
    theirs = [group for group in there.values() if not group.leads]

    def in_all(what: str) -> tuple[float, float]:
        scale = 1 / _GIB if what == "memory" else 1
        of_mine = sum(pods * group[what] for pods, group in mine)
        return of_mine * scale, sum(group.most * getattr(group, what) for group in theirs) * scale

    beyond = [
        f"{more:g} {unit} of {room:g}"
        for what, unit in (("gpus", "GPUs"), ("cpu", "cores"), ("memory", "GiB"))
        for more, room in (in_all(what),)
        if more > room
    ]
    if not beyond:
        return []
    return [
        f"its workers take more than the chart's quota counts for a job ({', '.join(beyond)}): where the quota is on, "
        "some pods are not made; raise quota.jobs, or ask for fewer workers"
    ]


def workers_per_pod(workers: int, on_gpu: bool, gpus_per_machine: int) -> int:
    """How many workers share a pod: those of a machine's GPUs, spread evenly over as few machines as it takes."""
    if not on_gpu:
        return 1
    return math.ceil(workers / math.ceil(workers / gpus_per_machine))


def pod_memory(need: Need, workers: int) -> tuple[int, int]:
    """Bytes of a pod, and of its /dev/shm, which is part of it; whole GiB."""
    if need.on_gpu:
        each, of_ray, shm = need.host + _LOADERS + _PROCESS_OF_GPU, _RAY_OF_GPU, workers * _LOADERS
    else:
        each, of_ray, shm = need.device + need.host + _PROCESS, _RAY, workers * _SHM
    total = workers * each * _SPARE + of_ray + shm
    return math.ceil(total / _GIB) * _GIB, shm


def workers_values(group: dict[str, Any], own: str, there: Mapping[str, Group]) -> dict[str, Any]:
    """The chart's `workers` with the recipe's group alone: in place of the one called `own`, whose node selector and
    other settings stay; the rest is left out, but for those that lead jobs."""
    train = [name for name, found in there.items() if not found.leads]
    if own in there and there[own].has_selector:
        group = {name: value for name, value in group.items() if name != "nodeSelector"}
    return {**dict.fromkeys(train), own: group}
