"""Which part of every tensor a worker writes: what it alone holds, and its share of what all of them hold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shoal.core.parts import FlatPart, Held, is_distributed, local_place

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SMALLEST_CUT = 1 << 16
"""Bytes; a tensor that is smaller is never divided."""


@dataclass(frozen=True)
class Piece:
    """A block of a tensor, and where in the whole it belongs."""

    name: str
    block: torch.Tensor
    """Not a copy: what it holds changes with the next step."""
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the block is all of the tensor."""
        return tuple(self.block.shape) == self.whole_shape


class Division:
    """`pieces_to_write`, found out once as long as the same tensors are asked for: a training step waits for it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._asked: Sequence[tuple[object, ...]] | None = None
        self._pieces: list[Piece] = []

    def pieces(self, tensors: Mapping[str, Held], of_first: frozenset[str]) -> list[Piece]:
        """The same list as before, where nothing but numbers has changed."""
        # The pieces hold on to the memory of their tensors, so another tensor cannot be where one of them was.
        asked = [(name, *_whereabouts(held)) for name, held in tensors.items()]
        if asked != self._asked:
            self._pieces = pieces_to_write(tensors, of_first, self.rank, self.world_size)
            self._asked = asked
        return self._pieces


def _whereabouts(held: Held) -> tuple[object, ...]:
    """Other memory, or memory read otherwise, is other whereabouts."""
    if isinstance(held, FlatPart):
        return (held.start, held.whole_shape, *_whereabouts(held.flat))
    if is_distributed(held):
        return (id(held.device_mesh), held.placements, held.shape, *_whereabouts(held.to_local()))
    return held.data_ptr(), held.shape, held.stride(), held.dtype, held.is_conj(), held.is_neg()


def pieces_to_write(tensors: Mapping[str, Held], of_first: frozenset[str], rank: int, world_size: int) -> list[Piece]:
    """This worker's pieces. Those of all workers together cover every tensor, without overlap.

    No worker asks another: each knows the same names and sizes, and so comes to the same division.

    Args:
        tensors: By name. A plain tensor is the same on every worker; a DTensor says which part of it is here, a
            `FlatPart` is on no other.
        of_first: Plain tensors that may differ between workers, of which rank 0's are the ones that count.
        rank: Of this worker.
        world_size: How many there are.
    """
    pieces: list[Piece] = []
    shared: dict[tuple[int, int], list[Piece]] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if isinstance(tensor, FlatPart):
            pieces += [Piece(name, block, tensor.whole_shape, offset) for block, offset in tensor.blocks()]
        elif is_distributed(tensor):
            piece, copies, which = _local_piece(name, tensor)
            if piece is not None:
                shared.setdefault((copies, which), []).append(piece)
        elif name not in of_first:
            shared.setdefault((world_size, rank), []).append(_whole(name, tensor))
        elif rank == 0:
            pieces.append(_whole(name, tensor))
    for (copies, which), found in shared.items():
        pieces += _share(found, copies, which)
    return pieces


def _whole(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def _local_piece(name: str, tensor: "DTensor") -> tuple[Piece | None, int, int]:
    """What of a DTensor is here, how many workers hold the same, and which of them this is."""
    from torch.distributed.tensor import Replicate

    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None, 1, 0
    copies, which = 1, 0
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            copies, which = copies * mesh.size(dimension), which * mesh.size(dimension) + coordinate[dimension]
    offset, shape = local_place(tensor)
    if math.prod(shape) == 0 and tensor.numel() != 0:
        return None, copies, which
    return Piece(name, tensor.to_local(), tuple(tensor.shape), offset), copies, which


def _share(pieces: Sequence[Piece], copies: int, which: int) -> list[Piece]:
    """The part of `pieces` that falls to one of `copies` workers who hold the same ones.

    Laid one after the other they are cut into equal lengths, at a row of the tensor that a cut falls into.
    """
    if copies == 1:
        return list(pieces)
    sizes = [piece.block.numel() * piece.block.element_size() for piece in pieces]
    total, begin, own = sum(sizes), 0, []
    for piece, size in zip(pieces, sizes, strict=True):
        first = _row_at(piece, size, total * which / copies - begin, is_first=which == 0)
        last = _row_at(piece, size, total * (which + 1) / copies - begin, is_first=False)
        if which == copies - 1:
            last = _rows(piece)
        if first < last:
            own.append(_cut(piece, first, last))
        begin += size
    return own


def _rows(piece: Piece) -> int:
    """Into how many parts a piece can be cut."""
    size = piece.block.numel() * piece.block.element_size()
    return piece.block.shape[0] if piece.block.ndim and size >= _SMALLEST_CUT else 1


def _row_at(piece: Piece, size: int, position: float, is_first: bool) -> int:
    """The row of a piece at which a cut at `position` bytes from its beginning is made."""
    if is_first:
        return 0
    rows = _rows(piece)
    share = position / size if size else math.copysign(1.0, position)
    return min(max(round(share * rows), 0), rows)


def _cut(piece: Piece, first: int, last: int) -> Piece:
    if (first, last) == (0, _rows(piece)):
        return piece
    block = piece.block.narrow(0, first, last - first)
    return Piece(piece.name, block, piece.whole_shape, (piece.offset[0] + first, *piece.offset[1:]))
