"""Writing a file and knowing its hash: taken from memory on the way out, never from what the disk gives back."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import xxhash

from shoal.checkpoint.manifest import CorruptCheckpointError, FileFacts
from shoal.checkpoint.stage import Staged

_CHUNK = 1 << 23


class NotFiniteError(Exception):
    """A weight or a moment is infinite or not a number."""


class CancelledError(Exception):
    """The save was called off."""


def write_file(path: Path, chunks: Iterable[bytes | memoryview], go_on: Callable[[], bool]) -> FileFacts:
    """Write a file that is safe on the disk when this returns; `go_on` is asked at every chunk."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
            if not go_on():
                raise CancelledError
            digest.update(chunk)
            written = 0
            view = memoryview(chunk)
            while written < len(view):
                written += file.write(view[written:])
            # Have the disk begin at once, rather than at the fsync.
            os.posix_fadvise(file.fileno(), num_bytes, len(view), os.POSIX_FADV_DONTNEED)
            num_bytes += len(view)
        os.fsync(file.fileno())
    return FileFacts(num_bytes, digest.hexdigest())


def shard_chunks(staged: Staged) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file."""
    yield staged.header
    data = memoryview(staged.data.numpy().data)
    for begin in range(0, len(data), _CHUNK):
        yield data[begin : begin + _CHUNK]


def check_finite(tensors: Iterable[torch.Tensor], go_on: Callable[[], bool]) -> None:
    """Raise `NotFiniteError` if one of them holds an infinity or nan."""
    for tensor in tensors:
        if not go_on():
            raise CancelledError
        for part in torch.split(tensor.reshape(-1), _CHUNK):  # so that what the check itself takes stays small
            if not _is_finite(part):
                raise NotFiniteError


def _is_finite(tensor: torch.Tensor) -> bool:
    """By NumPy where that can be: its one thread takes nothing from those that train."""
    if tensor.dtype == torch.bfloat16:  # which NumPy does not know: all ones in the exponent
        return not bool((tensor.view(torch.int16).numpy() & 0x7F80 == 0x7F80).any())
    if tensor.dtype in (torch.float16, torch.float32, torch.float64, torch.complex64):
        return bool(np.isfinite(tensor.numpy()).all())
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.float()).all())


def verify_file(path: Path, facts: FileFacts) -> None:
    """Read every byte; raise `CorruptCheckpointError` unless all are as they were written."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with path.open("rb", buffering=0) as file:
            if (size := os.fstat(file.fileno()).st_size) != facts.num_bytes:
                raise CorruptCheckpointError(f"{path.name} has {size:,} bytes instead of {facts.num_bytes:,}")
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                num_bytes += count
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise CorruptCheckpointError(f"{path.name} is missing") from error
    if digest.hexdigest() != facts.xxh3_128:
        raise CorruptCheckpointError(f"{path.name} has changed since it was written (its hash differs)")
