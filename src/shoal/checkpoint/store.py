"""Checkpoints in a folder: written aside, committed by one rename, verified byte by byte when read.

    step-00000500/
      tensors.safetensors   weights and optimizer state, by name
      state.json            small state: step, random generators, schedule, best metric
      manifest.json         size and hash of the other files, step, metrics, versions

A folder without the `step-` name is not a checkpoint: it was being written, or was found corrupt.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shoal.core.errors import RunError, UserError
from shoal.core.storage import fsync_directory
from shoal.core.version import VERSION

FORMAT = 1
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint, as its manifest tells."""

    path: Path
    step: int
    epoch: int
    metrics: Mapping[str, float]
    """Validation metrics, where this step was evaluated."""
    num_bytes: int
    time: float


@dataclass(frozen=True)
class Snapshot:
    """What is saved: tensors by name, and values that JSON can hold."""

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


class CorruptCheckpointError(Exception):
    """A checkpoint's files are not what its manifest says."""


def save_checkpoint(
    folder: Path, snapshot: Snapshot, *, step: int, epoch: int, metrics: Mapping[str, float]
) -> CheckpointInfo:
    """Write a checkpoint; whatever dies meanwhile, afterwards it is there whole or not at all."""
    target = folder / f"step-{step:08d}"
    aside = folder / f".writing-{target.name}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        save_file(_separate(snapshot.tensors), aside / _TENSORS)
        (aside / _STATE).write_text(json.dumps(snapshot.values), encoding="utf-8")
        files = {
            name: {"bytes": (aside / name).stat().st_size, "sha256": _sha256(aside / name)}
            for name in (_TENSORS, _STATE)
        }
        manifest = {
            "format": FORMAT,
            "step": step,
            "epoch": epoch,
            "metrics": dict(metrics),
            "time": time.time(),
            "files": files,
            "versions": {"shoal": VERSION, "torch": torch.__version__},
        }
        (aside / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for name in (_TENSORS, _STATE, _MANIFEST):
            _fsync(aside / name)
        fsync_directory(aside)
        replaced = folder / f".replaced-{target.name}"
        if target.exists():  # the same step again, with an evaluation that was still to come the first time
            target.rename(replaced)
        aside.rename(target)
        fsync_directory(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise RunError(
            f"checkpoint of step {step} could not be written to {folder}: {error}; earlier checkpoints are untouched"
        ) from error
    return _info(target, manifest)


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """The checkpoints of a run whose manifest can be read, oldest first. Reads nothing but manifests."""
    found = []
    for path in _step_folders(folder):
        try:
            found.append(_read_info(path))
        except CorruptCheckpointError:
            continue  # told of when a run is resumed
    return found


def read_checkpoint(info: CheckpointInfo) -> Snapshot:
    """The content of a checkpoint; raises `CorruptCheckpointError` unless every byte is as it was written."""
    try:
        manifest = json.loads((info.path / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] > FORMAT:
            raise UserError(
                f"--resume: {info.path} was written by Shoal {manifest['versions']['shoal']} in format "
                f"{manifest['format']}, and this is Shoal {VERSION}, which reads up to {FORMAT}; use the newer one"
            )
        for name, expected in manifest["files"].items():
            _verify(info.path / name, expected["bytes"], expected["sha256"])
        values = json.loads((info.path / _STATE).read_text(encoding="utf-8"))
        return Snapshot(load_file(info.path / _TENSORS), values)
    except UserError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise CorruptCheckpointError(f"{type(error).__name__}: {error}") from error
    except OSError as error:  # a disk or file system that fails now says nothing about the checkpoint
        raise UserError(f"--resume: {info.path} cannot be read: {error}; mend that first") from error
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CorruptCheckpointError(f"{type(error).__name__}: {error}") from error


def newest_readable(folder: Path) -> Iterator[tuple[CheckpointInfo, Snapshot | CorruptCheckpointError]]:
    """From the newest checkpoint down to the first that can be read; the ones that cannot come with the reason."""
    for path in reversed(_step_folders(folder)):
        info = CheckpointInfo(path, _step_of(path), epoch=0, metrics={}, num_bytes=0, time=0.0)
        try:
            info = _read_info(path)
            snapshot = read_checkpoint(info)
        except CorruptCheckpointError as error:
            yield info, error
        else:
            yield info, snapshot
            return


def set_aside(info: CheckpointInfo) -> Path:
    """Rename a corrupt checkpoint so that it is no longer taken for one, but can still be looked at."""
    target = info.path.with_name(f"corrupt-{info.path.name}-{int(time.time())}")
    return info.path.rename(target)


def delete_checkpoint(info: CheckpointInfo) -> None:
    """Remove a checkpoint; renamed first, so that a crash in between leaves no half of one."""
    _remove(info.path)


def clear_leftovers(folder: Path) -> None:
    """Remove what a crash left half written or half deleted, and put back what was being replaced.

    Call only while holding the run's lock, and before reading a checkpoint.
    """
    for path in folder.glob(".replaced-*"):
        target = path.with_name(path.name.removeprefix(".replaced-"))
        if target.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(target)
    for pattern in (".writing-*", ".deleting-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors of which no two share memory, as the file format wants them."""
    seen: set[int] = set()
    separate: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        memory = whole.untyped_storage().data_ptr()
        separate[name] = whole.clone() if memory in seen else whole
        seen.add(memory)
    return separate


def _step_folders(folder: Path) -> list[Path]:
    """Oldest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _read_info(path: Path) -> CheckpointInfo:
    try:
        return _info(path, json.loads((path / _MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{_MANIFEST} cannot be read: {type(error).__name__}: {error}") from error


def _info(path: Path, manifest: Mapping[str, Any]) -> CheckpointInfo:
    return CheckpointInfo(
        path=path,
        step=int(manifest["step"]),
        epoch=int(manifest["epoch"]),
        metrics={str(name): float(value) for name, value in manifest["metrics"].items()},
        num_bytes=sum(int(entry["bytes"]) for entry in manifest["files"].values()),
        time=float(manifest["time"]),
    )


def _remove(path: Path) -> None:
    doomed = path.with_name(f".deleting-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _verify(path: Path, num_bytes: int, sha256: str) -> None:
    if path.stat().st_size != num_bytes:
        raise CorruptCheckpointError(f"{path.name} has {path.stat().st_size} bytes instead of {num_bytes}")
    if _sha256(path) != sha256:
        raise CorruptCheckpointError(f"{path.name} has changed since it was written (its hash differs)")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
