"""The workers as a block with sides: who sums gradients with whom, who shares a layer, who is the next stage."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.core.errors import UserError
from shoal.core.parts import is_distributed
from shoal.core.process import Process
from shoal.parallel.degrees import Degrees, DegreesError, by_node, find_degrees
from shoal.parallel.section import ParallelSection

COPIES, SHARDS, STAGES, TENSOR = "copies", "shards", "stages", "tensor"


@dataclass(frozen=True)
class Mesh:
    """The block of workers, and where in it this one is."""

    degrees: Degrees
    whole: DeviceMesh
    """All sides that are longer than one, and at least one side."""
    rank: int

    @property
    def data_rank(self) -> int:
        """Which share of the samples is this worker's."""
        degrees = self.degrees
        return self.rank % (degrees.data * degrees.tensor) // degrees.tensor

    @property
    def tensor_rank(self) -> int:
        """Which part of every layer is this worker's."""
        return self.rank % self.degrees.tensor

    @property
    def stage(self) -> int:
        """How many workers a micro-batch has gone through before this one."""
        return self.rank // (self.degrees.data * self.degrees.tensor)

    def part(self, *sides: str) -> DeviceMesh | None:
        """The workers along some sides, those with this one's place on the others; None where that is itself alone."""
        names = tuple(side for side in sides if side in (self.whole.mesh_dim_names or ()))
        return self.whole[names] if names else None


def build_mesh(section: ParallelSection, strategy: str, process: Process) -> Mesh:
    """The block that the recipe asks for. Every worker must call this.

    From the outermost side to the innermost: stages, copies, shards, parts of a layer. So those who talk most are
    neighbours, and so on one machine.
    """
    try:
        degrees = find_degrees(section, strategy, process.world_size, _workers_of_a_node(section, strategy, process))
    except DegreesError as error:
        raise UserError(f"parallel.{'.'.join(error.field)}: {error}") from error
    kept = _sides(section, strategy, degrees)
    return Mesh(degrees, _device_mesh(process.device.type, tuple(kept.items())), process.rank)


_MADE: dict[tuple[object, ...], DeviceMesh] = {}


def _device_mesh(device_type: str, sides: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """The same for the same sides, as long as the workers are joined: each has groups of its own, with threads."""
    world = dist.group.WORLD
    key = (world, device_type, sides)
    if key not in _MADE:
        for old in [made for made in _MADE if made[0] is not world]:
            del _MADE[old]
        names, sizes = zip(*sides, strict=True)
        _MADE[key] = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    return _MADE[key]


def _sides(section: ParallelSection, strategy: str, degrees: Degrees) -> dict[str, int]:
    """Those that are longer than one, and at least one side."""
    sides = {STAGES: degrees.stages, COPIES: degrees.copies, SHARDS: degrees.shards, TENSOR: degrees.tensor}
    kept = {name for name, size in sides.items() if size > 1}
    if strategy == "pipeline":  # its state is on the workers along that side and on no others, even if that is one
        kept.add(COPIES)
    elif strategy == "fsdp" or (COPIES in kept and strategy == "tensor" and section.tensor.across == "fsdp"):
        kept.add(SHARDS)  # where there is one worker a shard: else the copies would be divided
    return {name: size for name, size in sides.items() if name in kept} or {COPIES: 1}


def _workers_of_a_node(section: ParallelSection, strategy: str, process: Process) -> int | None:
    """How many workers each machine has, where that counts."""
    if not by_node(section, strategy):
        return None
    nodes = process.group.gather(process.node)
    size = nodes.count(nodes[0])
    blocks = [nodes[first : first + size] for first in range(0, len(nodes), size)]
    even = all(len(set(block)) == 1 and len(block) == size for block in blocks)
    if not even or len({block[0] for block in blocks}) < len(blocks):
        counts = ", ".join(str(nodes.count(node)) for node in dict.fromkeys(nodes))
        raise UserError(
            "parallel.fsdp.shard_size: node needs as many workers on each machine, one machine after the other, and "
            f"there are {counts}; set a number, or null for one copy of the model over all of them"
        )
    return size


def on_whole_mesh(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """A DTensor as one over all workers, the same along the sides that it knows nothing of; nothing is sent.

    So that whoever looks at it knows how many hold the same.
    """
    from torch.distributed.tensor import DTensor, Replicate

    own: tuple[str, ...] = tensor.device_mesh.mesh_dim_names or () if is_distributed(tensor) else ()
    names = mesh.whole.mesh_dim_names or ()
    if own == names:
        return tensor
    placements: dict[str, Any] = {}
    local = tensor
    if is_distributed(tensor):
        placements = dict(zip(own, tensor.placements, strict=True))
        local = tensor.to_local()
    return DTensor.from_local(
        local,
        mesh.whole,
        [placements.get(name, Replicate()) for name in names],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
