"""Reading a checkpoint: every byte verified first, then each tensor when it is asked for.

Files are safetensors and JSON: data, never code. Whoever reads may be more or fewer workers than wrote it, and may want
whole tensors, or blocks of them (`dcp`).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from shoal.checkpoint.folder import shard_name, worker_name
from shoal.checkpoint.layout import DTYPES
from shoal.checkpoint.manifest import CheckpointInfo, CorruptCheckpointError
from shoal.checkpoint.shard import verify_file
from shoal.checkpoint.stage import PLACES
from shoal.core.errors import UserError

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_READERS = 4
_LONGEST_HEADER = 100_000_000
"""What safetensors itself allows."""


def verify(info: CheckpointInfo, rank: int = 0, world_size: int = 1) -> None:
    """Read every byte of the files that fall to one of `world_size` readers; `CorruptCheckpointError` for damage."""
    names = sorted(info.manifest.files)[rank::world_size]
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            for _ in pool.map(lambda name: verify_file(info.path / name, info.manifest.files[name]), names):
                pass
    except OSError as error:  # a disk or file system that fails now says nothing about the checkpoint
        raise UserError(f"{info.path} cannot be read: {error}; mend that first") from error


@dataclass(frozen=True)
class Place:
    """Where a block of a tensor lies."""

    file: str
    entry: str
    """What it is called there."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Tensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint by name, each read from its files when it is asked for."""

    def __init__(self, info: CheckpointInfo) -> None:
        self.path = info.path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.places: dict[str, list[Place]] = {}
        try:
            for rank in range(info.manifest.world_size):
                self._read_header(shard_name(rank))
            not_whole = next((name for name in self.places if not self._is_whole(name)), None)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            raise CorruptCheckpointError(f"a shard cannot be read: {type(error).__name__}: {error}") from error
        if not_whole is not None:
            raise CorruptCheckpointError(f"{not_whole} is not whole: a part of it is in no file")

    def _is_whole(self, name: str) -> bool:
        return sum(math.prod(place.shape) for place in self.places[name]) == math.prod(self.shapes[name])

    def _read_header(self, file_name: str) -> None:
        with safe_open(self.path / file_name, framework="pt"):  # which looks whether everything is inside the file
            pass
        with (self.path / file_name).open("rb") as file:
            if (length := int.from_bytes(file.read(8), "little")) > _LONGEST_HEADER:
                raise ValueError(f"{file_name} begins with {length} bytes of names")
            header = json.loads(file.read(length))
        blocks = json.loads(header.pop("__metadata__")[PLACES])
        for name_there, entry in header.items():
            shape = tuple(entry["shape"])
            block = blocks.get(name_there, {"shape": shape, "offset": (0,) * len(shape)})
            name = block.get("of", name_there)
            self.shapes[name] = tuple(block["shape"])
            self.dtypes[name] = _TORCH_DTYPES[entry["dtype"]]
            place = Place(file_name, name_there, tuple(block["offset"]), shape)
            self.places.setdefault(name, []).append(place)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.block(name, (0,) * len(self.shapes[name]), self.shapes[name])

    def block(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A block of a tensor, put together from the files that hold parts of it."""
        places = self.places[name]
        if len(places) == 1 and places[0].shape == tuple(shape):
            return self._read(places[0], [slice(None)] * len(shape))
        whole = torch.empty(tuple(shape), dtype=self.dtypes[name])
        for place in places:
            begin = [max(a, b) for a, b in zip(offset, place.offset, strict=True)]
            end = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, place.offset, place.shape, strict=True)]
            if all(b < e for b, e in zip(begin, end, strict=True)):
                inside = [slice(b - o, e - o) for b, e, o in zip(begin, end, place.offset, strict=True)]
                outside = tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, offset, strict=True))
                whole[outside] = self._read(place, inside)
        return whole

    def _read(self, place: Place, inside: list[slice]) -> torch.Tensor:
        try:
            with safe_open(self.path / place.file, framework="pt") as file:
                if not inside:
                    return cast(torch.Tensor, file.get_tensor(place.entry))
                return cast(torch.Tensor, file.get_slice(place.entry)[tuple(inside)])
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpointError(f"{place.file} cannot be read: {error}") from error


@dataclass(frozen=True)
class Content:
    """All of a checkpoint."""

    tensors: Tensors
    values: dict[str, Any]
    """What there is once."""
    workers: list[dict[str, Any]]
    """What each worker had of its own, by rank."""


def read_content(info: CheckpointInfo) -> Content:
    """A checkpoint that has been verified."""
    expected = {"state.json", "recipe.yaml"}
    expected |= {name(rank) for name in (shard_name, worker_name) for rank in range(info.manifest.world_size)}
    if expected != info.manifest.files.keys():
        wrong = ", ".join(sorted(expected ^ info.manifest.files.keys())[:5])
        raise CorruptCheckpointError(f"its files are not those of {info.manifest.world_size} workers: {wrong}")
    try:
        values = _read_json(info.path / "state.json")
        workers = [_read_json(info.path / worker_name(rank)) for rank in range(info.manifest.world_size)]
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(f"{type(error).__name__}: {error}") from error
    return Content(Tensors(info), values, workers)


def _read_json(path: Path) -> dict[str, Any]:
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} holds no names")
    return values
