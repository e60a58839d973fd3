"""Weights that a new run begins with: an export, a model of Hugging Face's, or a checkpoint of another run.

Read by name from safetensors alone, which are data; a pickle could run code, and is refused.
"""

import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from shoal.checkpoint.check import look_at_whole, newest_whole
from shoal.checkpoint.export import PICKLES, PREFIX, SUFFIX
from shoal.checkpoint.folder import being_read, read_info
from shoal.checkpoint.layout import DTYPES
from shoal.checkpoint.manifest import CorruptCheckpointError
from shoal.checkpoint.read import Tensors
from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.core.storage import expand_home, is_checkpoint
from shoal.observe.runs import find_run
from shoal.train.restore import on_first

FIELD = "train.init_from"
_MOST_NAMES = 10
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass
class Initial:
    """What became of every tensor of a model that was to be filled."""

    path: str
    loaded: int = 0
    missing: list[str] = field(default_factory=list)
    """Not in the files: as they were initialised."""
    unexpected: list[str] = field(default_factory=list)
    """In the files alone: ignored."""
    misfits: list[str] = field(default_factory=list)
    """Of another shape, or numbers of another kind: as they were initialised. Names, and what differs."""
    passed_over: list[str] = field(default_factory=list)
    """Newer checkpoints that are not whole, in words."""

    def to_record(self) -> dict[str, Any]:
        """As an event."""
        lists = {"missing": self.missing, "unexpected": self.unexpected, "misfits": self.misfits}
        names = {f"{kind}_names": found[:_MOST_NAMES] for kind, found in lists.items()}
        counts = {kind: len(found) for kind, found in lists.items()}
        return {"path": self.path, "loaded": self.loaded, **counts, **names, "words": self.words()}

    def words(self) -> str:
        """A line for people, and one more for each thing that they may not expect."""
        total = self.loaded + len(self.missing) + len(self.misfits)
        lines = [f"weights from {self.path}: {self.loaded} of {total} tensors", *self.passed_over]
        kinds = {
            "not there, kept as initialised": self.missing,
            "different there, kept as initialised": self.misfits,
            "not in this model, ignored": self.unexpected,
        }
        return "\n".join(lines + [f"  {len(found)} {what}: {_some(found)}" for what, found in kinds.items() if found])


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


@dataclass(frozen=True)
class Described:
    """A tensor of a model, as it is before the model is divided among workers."""

    names: list[str]
    """More than one where it is tied."""
    shape: tuple[int, ...]
    dtype: torch.dtype


def describe(model: nn.Module) -> list[Described]:
    """Every tensor of a model."""
    own = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names_of.setdefault(id(tensor), []).append(name)
    firsts = [(names, own[names[0]]) for names in names_of.values()]
    return [Described(names, tuple(tensor.shape), tensor.dtype) for names, tensor in firsts]


def fill(
    model: list[Described], take: Callable[[Mapping[str, torch.Tensor]], None], where: str, process: Process
) -> Initial:
    """Have weights taken over, by name. Every worker must call this, and each reads what it needs by itself.

    Args:
        model: What there is to be filled.
        take: Given whole tensors by name, each read when it is asked for.
        where: Files, a checkpoint or a run.
        process: Which worker this is.

    Raises:
        UserError: On every worker, if one cannot read them, or nothing in them is of this model.
    """
    path, passed_over = on_first(process.group, lambda: _locate(where))
    account, message = Initial(path, passed_over=passed_over), None
    try:
        with _opened(Path(path)) as given:
            chosen = _choose(model, given, account)
            _check_some_fit(model, given, account)
            take(_Chosen(chosen, given.read))
    except UserError as error:
        message = str(error)
    except (CorruptCheckpointError, SafetensorError, OSError) as error:
        message = f"{FIELD}: {path} cannot be read on {socket.gethostname()}: {error}"
    if found := next(filter(None, process.group.gather(message)), None):
        raise UserError(found)
    return account


def _locate(where: str) -> tuple[str, list[str]]:
    """The file or folder to read, the checkpoint of a run verified, and what was passed over on the way."""
    path = expand_home(where)
    if path.is_file():
        if path.suffix in PICKLES:
            raise UserError(_no_pickles(path))
        return str(path), []
    if is_checkpoint(path):
        return str(look_at_whole(path, FIELD).path), []
    is_run = (path / "recipe.yaml").is_file()
    if path.is_dir() and not is_run:
        return str(path), []
    if not is_run:
        try:
            path = find_run(where)
        except UserError as error:
            raise UserError(f"{FIELD}: {where} is neither a file nor a folder, nor a run ({error})") from error
    found, rejected = newest_whole(path / "checkpoints")
    words = [f"  step {looked.step} is {looked.state}, so not that one: {looked.words}" for looked in rejected]
    if found is None:
        why = f" ({words[0].strip()})" if words else ""
        raise UserError(f"{FIELD}: {path} is a run without a checkpoint that is whole{why}; give another")
    return str(found.path), words


@dataclass(frozen=True)
class _Given:
    """Weights to be had, each read when it is asked for."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], torch.Tensor]


class _Chosen(Mapping[str, torch.Tensor]):
    """Weights by the names that they have in the model, each read when it is asked for."""

    def __init__(self, names: dict[str, str], read: Callable[[str], torch.Tensor]) -> None:
        self.names = names
        self.read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(self.names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Given]:
    if is_checkpoint(path):
        info = read_info(path)
        with being_read(info):
            tensors = Tensors(info)
            names = [name.removeprefix(PREFIX) for name in tensors if name.startswith(PREFIX)]
            shapes = {name: tensors.shapes[PREFIX + name] for name in names}
            dtypes = {name: tensors.dtypes[PREFIX + name] for name in names}
            yield _Given(shapes, dtypes, lambda name: tensors[PREFIX + name])
        return
    files = _names_by_file(path)
    places: dict[str, Path] = {}
    shapes, dtypes = {}, {}
    for file, wanted in files.items():
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys() if wanted is None else sorted(wanted):
                found = opened.get_slice(name)
                places[name], shapes[name] = file, tuple(found.get_shape())
                dtypes[name] = _TORCH_DTYPES.get(found.get_dtype(), torch.float32)  # a float that is newer than we know

    def read(name: str) -> torch.Tensor:
        with safe_open(places[name], framework="pt") as opened:
            return cast(torch.Tensor, opened.get_tensor(name))

    yield _Given(shapes, dtypes, read)


def _names_by_file(path: Path) -> dict[Path, set[str] | None]:
    """The files to read, and which names from each; None: all that are in it."""
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"{FIELD}: {path} is not on {socket.gethostname()}; every worker reads it")
        return {path: None}
    if index := next(iter(sorted(path.glob(f"*{SUFFIX}.index.json"))), None):
        return _read_index(index)
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise UserError(f"{FIELD}: {path} holds {len(found)} {SUFFIX} files and no index; give one of them")
    if pickles := [file for file in sorted(path.iterdir()) if file.suffix in PICKLES]:
        raise UserError(_no_pickles(pickles[0]))
    raise UserError(f"{FIELD}: {path} holds no {SUFFIX} file; give an export, a checkpoint or a run")


def _read_index(index: Path) -> dict[Path, set[str] | None]:
    files: dict[Path, set[str] | None] = {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not a file beside it")
            cast(set[str], files.setdefault(index.with_name(file), set())).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{FIELD}: {index} is not an index of {SUFFIX} files: {error}") from error
    return files


def _no_pickles(path: Path) -> str:
    return (
        f"{FIELD}: {path} may be a pickle, which can run code when it is read; where you trust it, convert it: "
        "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
    )


def _choose(model: list[Described], given: _Given, account: Initial) -> dict[str, str]:
    """Name here -> name there of what fits. A tensor with several names (tied weights) may be given by any of them."""
    chosen: dict[str, str] = {}
    for tensor in model:
        there = [name for name in tensor.names if name in given.shapes]
        if not there:
            account.missing.append(tensor.names[0])
        elif (shape := given.shapes[there[0]]) != tensor.shape:
            account.misfits.append(f"{there[0]} {list(shape)} instead of {list(tensor.shape)}")
        elif (dtype := given.dtypes[there[0]]).is_floating_point != tensor.dtype.is_floating_point:
            account.misfits.append(f"{there[0]} {dtype} instead of {tensor.dtype}")
        else:
            chosen[tensor.names[0]] = there[0]
            account.loaded += 1
            # Untied there and tied here: there is room for the first alone.
            first = given.read(there[0]) if there[1:] else None
            account.unexpected += [n for n in there[1:] if first is None or not torch.equal(given.read(n), first)]
    own = {name for tensor in model for name in tensor.names}
    account.unexpected += sorted(name for name in given.shapes if name not in own)
    return chosen


def _check_some_fit(model: list[Described], given: _Given, account: Initial) -> None:
    if account.loaded:
        return
    if account.misfits:
        raise UserError(f"{FIELD}: nothing in {account.path} fits this model: {_some(account.misfits)}")
    own = [name for tensor in model for name in tensor.names]
    theirs, ours = (", ".join(sorted(names)[:3]) or "none" for names in (given.shapes, own))
    raise UserError(
        f"{FIELD}: none of the {len(given.shapes)} names in {account.path} ({theirs}, ...) is one of this model's "
        f"({ours}, ...); give weights of the same architecture, or rename them"
    )
