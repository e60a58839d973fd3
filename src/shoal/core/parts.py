"""What one worker holds of a tensor that is divided among several."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class FlatPart:
    """A stretch of a tensor laid out flat, which no other worker holds. (What else can be divided is a DTensor.)"""

    flat: torch.Tensor
    """Of one dimension; not a copy."""
    start: int
    """Where in the whole, laid out flat, it begins."""
    whole_shape: tuple[int, ...]

    def blocks(self) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        """The same as rectangular blocks, each with its offset in the whole: a first row in part, whole rows, a last
        one in part. Of a tensor without elements, that one."""
        if not math.prod(self.whole_shape):
            yield self.flat.view(self.whole_shape), (0,) * len(self.whole_shape)
        begin = 0
        for offset, shape in _rectangles(self.whole_shape, self.start, self.start + self.flat.numel()):
            end = begin + math.prod(shape)
            yield self.flat[begin:end].view(shape), offset
            begin = end


Held = torch.Tensor | FlatPart
"""A plain tensor is the same on every worker; a DTensor says itself which part of it is here."""


def _rectangles(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and shapes of the blocks that elements [start, end) of a tensor form."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # the rows that are there as a whole
    if first > last:  # within one row
        yield from _within(shape, first - 1, start, end)
        return
    yield from _within(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _within(shape, last, last * row, end)


def _within(shape: Sequence[int], row: int, start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    begin = row * math.prod(shape[1:])
    for offset, size in _rectangles(shape[1:], start - begin, end - begin):
        yield (row, *offset), (1, *size)


def is_distributed(tensor: Any) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor; without loading what there may be no need for."""
    return hasattr(tensor, "device_mesh")


def local_place(tensor: "DTensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of what this worker holds of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)


def shape_of(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...]:
    """The shape of a tensor, which is not read for it where it is in a file."""
    shapes: Mapping[str, tuple[int, ...]] | None = getattr(tensors, "shapes", None)
    return shapes[name] if shapes is not None else tuple(tensors[name].shape)


def read_block(
    tensors: Mapping[str, torch.Tensor], name: str, offset: Sequence[int], shape: Sequence[int]
) -> torch.Tensor:
    """A block of a tensor; from a file, no more than that is read."""
    if hasattr(tensors, "block"):
        block: torch.Tensor = tensors.block(name, offset, shape)
        return block
    return tensors[name][tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))]


def read_flat(tensors: Mapping[str, torch.Tensor], name: str, start: int, count: int) -> torch.Tensor:
    """Elements [start, start + count) of a tensor laid out flat; from a file, no more rows than hold them are read."""
    shape = shape_of(tensors, name)
    if not shape:
        return tensors[name].reshape(-1)[start : start + count]
    row = math.prod(shape[1:])
    first, last = (start // row, -(-(start + count) // row)) if count else (0, 0)
    rows = read_block(tensors, name, (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    return rows.reshape(-1)[start - first * row : start - first * row + count]


def copy_own_part(target: torch.Tensor, tensors: Mapping[str, torch.Tensor], name: str) -> None:
    """Fill what this worker holds of `target`, plain or distributed, from whole tensors."""
    if is_distributed(target):
        offset, shape = local_place(target)
        if math.prod(shape) or not target.numel():
            target.to_local().copy_(read_block(tensors, name, offset, shape))
    else:
        target.copy_(tensors[name])
