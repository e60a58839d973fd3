"""Gradients summed over workers once a step is computed, for strategies whose gradients do not travel by themselves."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def sum_in_buckets(tensors: Sequence[torch.Tensor], group: Any, bucket_bytes: int) -> None:
    """Sum each tensor over the workers of a group, many of them in one go."""
    bucket: list[torch.Tensor] = []
    size = 0
    for number, tensor in enumerate(tensors):
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
        is_end = number + 1 == len(tensors) or tensors[number + 1].dtype != tensor.dtype
        if is_end or size >= bucket_bytes:
            flat = torch.cat([each.reshape(-1) for each in bucket])
            dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [each.numel() for each in bucket])
            torch._foreach_copy_(bucket, [part.view(each.shape) for part, each in zip(parts, bucket, strict=True)])
            bucket, size = [], 0
