"""How gradients cross the network: packed, or by way of one worker a machine. Hooks for DistributedDataParallel."""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.parallel.section import ParallelSection


def register_hook(ddp: DistributedDataParallel, section: ParallelSection, process: Process) -> None:
    """Make `ddp` send gradients as the section says."""
    if section.hierarchical:
        nodes = process.group.gather(process.node)
        ddp.register_comm_hook(_Levels(nodes, process.rank), _sum_by_levels)
    elif section.compress == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif section.compress == "bf16":
        ddp.register_comm_hook(process.world_size, _sum_in_bf16)
    elif section.compress == "powersgd":
        if process.device.type == "cpu" and torch.cuda.is_available():
            raise UserError(
                "parallel.compress: PyTorch's powersgd fails on the CPU of a machine that has a GPU; "
                "use bf16, or hide the GPU with CUDA_VISIBLE_DEVICES="
            )
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=section.powersgd_rank,
            start_powerSGD_iter=section.powersgd_start_step,
        )
        hook = powerSGD_hook.powerSGD_hook if dist.get_backend() == "nccl" else _one_after_the_other
        ddp.register_comm_hook(state, hook)


def _one_after_the_other(state: powerSGD_hook.PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's hook, done before the next bucket begins.

    It sends more when what it sent first has come. NCCL keeps to the order in which buckets began; Gloo's threads go on
    with whichever is first, another one on every worker, so that parts of one bucket would be added to another's.
    """
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


def _sum_in_bf16(world_size: int, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket, sent in half the bytes; PyTorch's own hook of this kind is for NCCL alone."""
    whole = bucket.buffer()
    packed = whole.to(torch.bfloat16).div_(world_size)
    future = dist.all_reduce(packed, async_op=True).get_future()

    def unpack(done: torch.futures.Future[Any]) -> torch.Tensor:
        return whole.copy_(done.value()[0])

    unpacked: torch.futures.Future[torch.Tensor] = future.then(unpack)
    return unpacked


class _Levels:
    """Who talks to whom: all workers of a machine with their first, the first ones with each other."""

    def __init__(self, nodes: list[str], rank: int) -> None:
        members = {node: [r for r, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)}
        self.world_size = len(nodes)
        self.leader = members[nodes[rank]][0]
        self.is_leader = rank == self.leader
        # Every process must make every group, in the same order.
        groups = {node: dist.new_group(ranks) for node, ranks in members.items()}
        self.inside = groups[nodes[rank]]
        self.between = dist.new_group([ranks[0] for ranks in members.values()])


def _sum_by_levels(levels: _Levels, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket: summed inside machines, then between them, and handed out again."""
    whole = bucket.buffer().div_(levels.world_size)
    dist.reduce(whole, levels.leader, group=levels.inside)
    if levels.is_leader:
        dist.all_reduce(whole, group=levels.between)
    dist.broadcast(whole, levels.leader, group=levels.inside)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(whole)
    return done
