"""Host memory that a worker's part of a state is copied to, so that training goes on while it is written.

One buffer, kept from save to save, and laid out as the file will be: writing it needs no further copy.
"""

import contextlib
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.checkpoint.layout import lay_out
from shoal.checkpoint.pieces import Piece

PLACES = "shoal.places"
"""Where a shard says of which tensors it holds but a block."""


@dataclass(frozen=True)
class Staged:
    """A worker's part of a state at one step, as it goes into a safetensors file."""

    header: bytes
    data: torch.Tensor
    """Bytes; valid until the next state is staged."""
    tensors: dict[str, list[torch.Tensor]]
    """Views of `data`, by the name of what they are blocks of."""


class Stage:
    """Takes one state at a time. On a GPU machine its memory is pinned, for copies at the speed of the bus."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pieces: Sequence[Piece] | None = None
        self._staged: Staged | None = None
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        """To where, and of what."""

    def take(self, pieces: Sequence[Piece]) -> Staged:
        """Copy the pieces; when this returns, the originals may change.

        The same list again is copied to the same places: what the file will look like is found out once, for a training
        step waits.
        """
        if self._staged is None or pieces is not self._pieces:
            self._pieces, self._staged = pieces, self._lay_out(pieces)
            self._copies = ([own for each in self._staged.tensors.values() for own in each], _by_name(pieces))
        if pieces:
            torch._foreach_copy_(*self._copies, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self._staged

    def _lay_out(self, pieces: Sequence[Piece]) -> Staged:
        """Where in the buffer, and so in the file, each piece has its place."""
        entries = _entries(pieces)
        parts = {
            entry: {"of": piece.name, "shape": piece.whole_shape, "offset": piece.offset}
            for entry, piece in entries.items()
            if not piece.is_whole
        }
        kinds = {entry: (piece.block.dtype, tuple(piece.block.shape)) for entry, piece in entries.items()}
        layout = lay_out(kinds, {PLACES: json.dumps(parts)})
        self._staged, self._copies = None, ([], [])  # their views would keep the old buffer
        self._make_room(layout.num_bytes)
        tensors: dict[str, list[torch.Tensor]] = {}
        for entry, piece in entries.items():
            (begin, end), (dtype, shape) = layout.places[entry], kinds[entry]
            tensors.setdefault(piece.name, []).append(self._buffer[begin:end].view(dtype).view(shape))
        return Staged(layout.header, self._buffer[: layout.num_bytes], tensors)

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes <= self._buffer.numel():
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # let go of the old one first: never two at a time
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if self.device.type == "cuda":
            _pin(self._buffer)


def _by_name(pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """The blocks, those of one tensor together."""
    blocks: dict[str, list[torch.Tensor]] = {}
    for piece in pieces:
        blocks.setdefault(piece.name, []).append(piece.block)
    return [block for each in blocks.values() for block in each]


def _entries(pieces: Sequence[Piece]) -> dict[str, Piece]:
    """What each piece is called in the file: by its name, or, where there are more of that name, a number besides."""
    entries: dict[str, Piece] = {}
    names = {piece.name for piece in pieces}
    for piece in pieces:
        entry, number = piece.name, 1
        while entry in entries or (number > 1 and entry in names):
            number += 1
            entry = f"{piece.name}#{number}"
        entries[entry] = piece
    return entries


def _pin(buffer: torch.Tensor) -> None:
    """Lock memory in place for the GPU to write to.

    Not torch's own pinned memory, which is handed out in powers of two: of 33 GiB of state it would take 64. Memory
    that cannot be pinned (a limit of the system) is used as it is; copies are slower then.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)) == 0:
        weakref.finalize(buffer.untyped_storage(), _unpin, buffer.data_ptr())


def _unpin(address: int) -> None:
    with contextlib.suppress(RuntimeError):  # the driver may be gone before us
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
