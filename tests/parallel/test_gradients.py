"""Gradients averaged by hand: the mean or the sum over real workers, also where some of them have none."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shoal.core.process import Process
from shoal.parallel.gradients import align_gradients, average_gradients, local_gradient
from tests.many import CPU, Ranks

MakeRanks = Callable[[int], Ranks]


def averaged(process: Process, bucket_bytes: int) -> list[torch.Tensor | None]:
    """Of a mean, a sum, one that only the last worker has (twice, once divided), and one that nobody has."""
    mesh = init_device_mesh("cpu", (process.world_size,))
    is_last = process.rank == process.world_size - 1
    mean, total, of_last, of_nobody = (nn.Parameter(torch.zeros(3, 2)) for _ in range(4))
    divided = nn.Parameter(distribute_tensor(torch.zeros(5, 2), mesh, [Replicate()], src_data_rank=None))
    mean.grad = torch.full((3, 2), float(process.rank))
    total.grad = torch.full((3, 2), float(process.rank))
    if is_last:
        of_last.grad = torch.ones(3, 2)
        divided.grad = distribute_tensor(torch.full((5, 2), 6.0), mesh, [Replicate()], src_data_rank=None)
    parameters = [mean, total, of_last, divided, of_nobody]
    assert dist.group.WORLD is not None
    average_gradients(parameters, [False, True, False, False, False], dist.group.WORLD, bucket_bytes, CPU)
    assert divided.grad is not None and divided.grad.placements == (Replicate(),)
    return [local_gradient(parameter) for parameter in parameters]


def test_the_mean_and_the_sum_over_workers(ranks: MakeRanks) -> None:
    for bucket_bytes in (1 << 20, 30):
        for mean, total, of_last, divided, of_nobody in ranks(3)(averaged, bucket_bytes):
            assert torch.allclose(mean, torch.full((3, 2), 1.0)) and torch.allclose(total, torch.full((3, 2), 3.0))
            assert torch.allclose(of_last, torch.full((3, 2), 1 / 3)) and torch.allclose(
                divided, torch.full((5, 2), 2.0)
            )
            assert of_nobody is None


def aligned(process: Process) -> tuple[list[float], list[float]]:
    """Of a gradient that is summed in part, and of one that is whole where the parameter is divided."""
    mesh = init_device_mesh("cpu", (process.world_size,))
    whole = torch.arange(5.0)
    same = nn.Parameter(distribute_tensor(torch.zeros(5), mesh, [Replicate()], src_data_rank=None))
    divided = nn.Parameter(distribute_tensor(torch.zeros(5), mesh, [Shard(0)], src_data_rank=None))
    same.grad = DTensor.from_local(torch.ones(5), mesh, [Partial()])
    divided.grad = DTensor.from_local(whole, mesh, [Replicate()])
    plain = nn.Parameter(torch.zeros(2))
    align_gradients([same, divided, plain])
    first, second = local_gradient(same), local_gradient(divided)
    assert first is not None and second is not None and plain.grad is None
    return first.tolist(), second.tolist()


def test_a_gradient_is_divided_as_its_parameter_is(ranks: MakeRanks) -> None:
    assert ranks(2)(aligned) == [([2.0] * 5, [0.0, 1.0, 2.0]), ([2.0] * 5, [3.0, 4.0])]
