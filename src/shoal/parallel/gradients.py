"""Gradients that workers average by themselves, where no part of PyTorch does it for them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.core.parts import is_distributed
from shoal.parallel.clip import local_gradient
from shoal.parallel.sums import sum_in_buckets


def align_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Have each gradient divided as its parameter is; PyTorch leaves some summed in part, or whole."""
    for parameter in parameters:
        gradient = parameter.grad
        if is_distributed(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def average_gradients(
    parameters: Sequence[nn.Parameter],
    summed: Sequence[bool],
    group: dist.ProcessGroup,
    bucket_bytes: int,
    device: torch.device,
) -> None:
    """Each gradient becomes the mean over the workers of `group`; where `summed` says so, the sum.

    A parameter that some workers have no gradient of gets the others'; one that nobody has one of, none.

    Args:
        parameters: The same on all of them, in the same order.
        summed: For each.
        group: Who has them.
        bucket_bytes: Sent at once.
        device: Sent from there, wherever a gradient is kept.
    """
    gradients = [local_gradient(parameter) for parameter in parameters]
    kept = [_zeros(each) if own is None else own for each, own in zip(parameters, gradients, strict=True)]
    sent = [gradient.to(device) for gradient in kept]
    if averaged := [gradient for gradient, is_sum in zip(sent, summed, strict=True) if not is_sum]:
        torch._foreach_mul_(averaged, 1.0 / dist.get_world_size(group))
    # How many have one travels along, and is looked at only where there is none here: a look waits for the GPU.
    holders = torch.tensor([float(own is not None) for own in gradients], device=device)
    sum_in_buckets([*sent, holders], group, bucket_bytes)
    for gradient, total in zip(kept, sent, strict=True):
        if gradient is not total:
            gradient.copy_(total)
    if any(own is None for own in gradients):
        for number, count in enumerate(holders.tolist()):
            if gradients[number] is None and count:
                _set_gradient(parameters[number], kept[number])


def _zeros(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter.to_local() if is_distributed(parameter) else parameter, requires_grad=False)


def _set_gradient(parameter: nn.Parameter, local: torch.Tensor) -> None:
    if is_distributed(parameter):
        mesh, placements, stride = parameter.device_mesh, parameter.placements, parameter.stride()
        parameter.grad = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=parameter.shape, stride=stride
        )
    else:
        parameter.grad = local
