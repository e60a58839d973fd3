"""Batches of any nesting, from one device to another."""

import copy
from collections.abc import Iterator
from typing import Any

import torch


def move(data: Any, device: torch.device) -> Any:
    """A batch of any nesting with its tensors on `device`; copies from pinned memory overlap with compute."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, dict):
        moved = copy.copy(data)  # of its own kind, whatever it takes to make one
        moved.update({key: move(value, device) for key, value in data.items()})
        return moved
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(move(value, device) for value in data)
    return data.to(device) if hasattr(data, "to") else data


def channels_last(data: Any) -> Any:
    """A batch as tuples of tensors, with its images laid out channel by channel for each pixel; others stay."""
    if isinstance(data, torch.Tensor):
        return data.contiguous(memory_format=torch.channels_last) if data.ndim == 4 else data
    return type(data)(map(channels_last, data)) if type(data) in (list, tuple) else data


def leaves(data: Any) -> Iterator[Any]:
    """What `move` comes to in the end: tensors, objects that move themselves, and things that stay."""
    if isinstance(data, dict):
        data = data.values()
    elif isinstance(data, torch.Tensor) or not isinstance(data, list | tuple):
        yield data
        return
    for value in data:
        yield from leaves(value)
