"""A checkpoint's weights as plain safetensors files, for whoever has torch and no Shoal.

One file, or shards with an index as Hugging Face writes them, and beside them a few lines that load them. Tensors go
from file to file one at a time, so that memory is never more than the largest of them.
"""

import contextlib
import itertools
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.folder import being_read
from shoal.checkpoint.layout import lay_out
from shoal.checkpoint.loader import loader_text
from shoal.checkpoint.manifest import CheckpointInfo, CorruptCheckpointError
from shoal.checkpoint.read import Tensors
from shoal.checkpoint.shard import write_file
from shoal.core.errors import RunError, UserError
from shoal.core.storage import fsync_directory
from shoal.core.version import VERSION

SUFFIX = ".safetensors"
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
INDEX = f"model{SUFFIX}.index.json"
LOADER = "load.py"
PREFIX = "model."
"""What the names of weights begin with in a checkpoint."""
_CHUNK = 1 << 20
"""Numbers that are converted at once."""
_EXPORTED = ("model*.safetensors", INDEX, LOADER)
FLOATS = {"keep": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Request:
    """What to write of a checkpoint, and where to."""

    run: str
    output: Path | None = None
    """A file that ends in .safetensors, or a folder; None: named after run and step, in the working directory."""
    max_shard_bytes: int = 5 * 10**9
    dtype: str = "keep"
    """What floating-point numbers become: one of `FLOATS`."""
    force: bool = False
    """Replace an earlier export."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    """A file or a folder."""
    files: list[Path]
    """That hold tensors."""
    loader: Path
    num_tensors: int
    num_bytes: int
    """Of all tensors."""


def export(info: CheckpointInfo, request: Request) -> Exported:
    """Write the weights of a checkpoint that has been verified. What is there already stays whole until all is done."""
    try:
        with being_read(info):
            return _export(info, request)
    except CorruptCheckpointError as error:  # although it has just been verified
        raise UserError(f"export: {info.path}: {error}") from error
    except PermissionError:
        raise
    except OSError as error:
        raise RunError(f"export: could not be written: {error.strerror or error}; nothing was left behind") from error


def _export(info: CheckpointInfo, request: Request) -> Exported:
    tensors, dtype = Tensors(info), FLOATS[request.dtype]
    names = sorted(name for name in tensors if name.startswith(PREFIX))
    sizes = {name: _num_bytes(tensors, name, dtype) for name in names}
    shards = divide(sizes, request.max_shard_bytes)
    target = _target(info, request, len(shards))
    check_target(target, request.force)
    metadata = {"shoal": VERSION, "run": request.run, "step": str(info.step)}
    origin = f"{request.run} at step {info.step}"
    if target.suffix == SUFFIX:
        loader = target.with_name(f"{target.stem}.{LOADER}")
        with _aside(target) as aside:
            _write_shard(aside, names, tensors, dtype, metadata)
        with _aside(loader) as aside:
            _write(aside, [loader_text(origin, [target.name], loader.name).encode()])
        return Exported(target, [target], loader, len(names), sum(sizes.values()))
    files = shard_names(len(shards))
    with _aside(target) as aside:
        aside.mkdir()
        for file, shard in zip(files, shards, strict=True):
            _write_shard(aside / file, shard, tensors, dtype, metadata)
        if len(files) > 1:
            _write(aside / INDEX, [json.dumps(_index(files, shards, sizes), indent=2).encode()])
        _write(aside / LOADER, [loader_text(origin, files, LOADER).encode()])
        fsync_directory(aside)
    return Exported(target, [target / file for file in files], target / LOADER, len(names), sum(sizes.values()))


def divide(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in shards of at most so many bytes, in their order; what is larger by itself has a shard of its own."""
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def shard_names(count: int) -> list[str]:
    """As Hugging Face calls them."""
    if count == 1:
        return [f"model{SUFFIX}"]
    return [f"model-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def _index(files: list[str], shards: list[list[str]], sizes: Mapping[str, int]) -> dict[str, Any]:
    where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    weight_map = {name.removeprefix(PREFIX): where[name] for name in sorted(where)}
    return {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}


def _target(info: CheckpointInfo, request: Request, num_shards: int) -> Path:
    if request.output is None:
        name = f"{request.run}-step-{info.step}"
        return Path(f"{name}{SUFFIX}") if num_shards == 1 else Path(name)
    if request.output.suffix == SUFFIX and num_shards > 1:
        raise UserError(
            f"-o: {request.output} is one file, and the weights do not fit into one of --max-shard-size; raise that, "
            "or give a folder"
        )
    return request.output


def check_target(target: Path, force: bool) -> None:
    """Refuse to write where something is, unless it is an earlier export and may go."""
    if target.suffix in PICKLES:
        raise UserError(f"-o: {target} is the name of a pickle, and this writes {SUFFIX} files; end it so")
    if not target.parent.is_dir():
        raise UserError(f"-o: the folder {target.parent} does not exist; make it first")
    loader = target.with_name(f"{target.stem}.{LOADER}") if target.suffix == SUFFIX else target
    if there := next((path for path in (target, loader) if os.path.lexists(path)), None):
        if not force:
            raise UserError(f"-o: {there} exists; choose another with -o, or replace it with --force")
        if target.suffix == SUFFIX and there.is_dir():
            raise UserError(f"-o: {there} is a folder, which --force does not replace by a file; choose another")
    if target.suffix != SUFFIX and os.path.lexists(target):
        known = {file for pattern in _EXPORTED for file in target.glob(pattern)}
        if target.is_symlink() or not target.is_dir() or set(target.iterdir()) - known:
            raise UserError(f"-o: {target} holds more than an export, so --force does not replace it; choose another")


@contextlib.contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """Where to write what then takes the place of `target`, in one step; nothing is left of what failed."""
    token = secrets.token_hex(4)
    aside, doomed = (target.with_name(f".{target.name}.{token}.{end}") for end in ("tmp", "old"))
    try:
        yield aside
        if target.is_dir():  # a file can be replaced in one step, a folder cannot
            target.rename(doomed)
        aside.rename(target)
    except BaseException:
        if doomed.is_dir():
            doomed.rename(target)
        shutil.rmtree(aside, ignore_errors=True) if aside.is_dir() else aside.unlink(missing_ok=True)
        raise
    fsync_directory(target.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def _write_shard(
    path: Path, names: list[str], tensors: Tensors, dtype: torch.dtype | None, metadata: Mapping[str, str]
) -> None:
    kinds = {name.removeprefix(PREFIX): (_dtype(tensors, name, dtype), tensors.shapes[name]) for name in names}
    layout = lay_out(kinds, metadata)
    parts = (_content(name, tensors[PREFIX + name], kinds[name][0]) for name in layout.places)
    _write(path, itertools.chain([layout.header], itertools.chain.from_iterable(parts)))


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    write_file(path, chunks, lambda: True)


def _content(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The bytes of a tensor as another type; `UserError` where that has no room for its values."""
    for part in torch.split(tensor.reshape(-1), _CHUNK):  # so that what the conversion itself takes stays small
        converted = part.to(dtype)
        if dtype != tensor.dtype and not torch.equal(torch.isfinite(converted), torch.isfinite(part)):
            raise UserError(f"--dtype: {name} has values that {dtype} cannot hold; use bf16, fp32 or keep")
        yield memoryview(converted.contiguous().view(torch.uint8).numpy().data)


def _dtype(tensors: Tensors, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """What a tensor is written as: counters and masks stay what they are."""
    own = tensors.dtypes[name]
    return dtype if dtype is not None and own.is_floating_point else own


def _num_bytes(tensors: Tensors, name: str, dtype: torch.dtype | None) -> int:
    return math.prod(tensors.shapes[name]) * _dtype(tensors, name, dtype).itemsize
