"""Writing a state that has been staged: by every worker its part, committed by rank 0, and older ones deleted.

All of this goes on in the background, in a thread of each worker.
"""

import itertools
import json
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from shoal.checkpoint.folder import (
    commit,
    delete_checkpoint,
    folder_to_write,
    list_checkpoints,
    shard_name,
    step_name,
    worker_name,
)
from shoal.checkpoint.manifest import FileFacts, Manifest
from shoal.checkpoint.retention import to_delete
from shoal.checkpoint.section import CheckpointSection
from shoal.checkpoint.shard import CancelledError, NotFiniteError, check_finite, shard_chunks, write_file
from shoal.checkpoint.stage import Staged
from shoal.core.errors import RunError
from shoal.core.group import Group
from shoal.core.parts import FlatPart, Held, is_distributed
from shoal.core.process import Process
from shoal.core.version import VERSION

SAVED, SUPERSEDED, FAILED, NOT_FINITE = "saved", "superseded", "failed", "not_finite"
"""What may become of an attempt; the same on every worker."""


@dataclass(frozen=True)
class Snapshot:
    """What one worker has of a run at one step."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    """Validation metrics, where this step was evaluated."""
    tensors: Mapping[str, Held]
    values: Mapping[str, Any]
    """What there is once; rank 0's is written."""
    own: Mapping[str, Any]
    """What this worker alone has."""
    of_first: frozenset[str] = frozenset()
    """Tensors of which rank 0's are the ones that count."""
    finite: frozenset[str] = frozenset()
    """Tensors that must be finite: what is not would poison every resume."""


class Writer:
    """One worker's side of writing checkpoints. Every worker must write the same steps."""

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSection,
        process: Process,
        group: Group,
        *,
        strategy: str,
        recipe: str,
        tell: Callable[[str, dict[str, Any]], None],
        in_use: Callable[[], Collection[int]],
    ) -> None:
        """Args:
        folder: Where checkpoints go; the same for every worker.
        settings: What to keep.
        process: Which worker this is.
        group: The workers, for this thread alone.
        strategy: Told in the manifest.
        recipe: The resolved recipe, kept with every checkpoint.
        tell: Given what happens, by name.
        in_use: Steps that must not be deleted.
        """
        self.folder = folder
        self.settings = settings
        self.process = process
        self.group = group
        self.strategy = strategy
        self.recipe = recipe
        self.tell = tell
        self.in_use = in_use
        # Nobody else writes into folders of this token, not even an earlier self that is still dying somewhere.
        self._token: str = process.group.from_first(secrets.token_hex(4))
        self._attempts = itertools.count()

    def write(self, snapshot: Snapshot, staged: Staged, go_on: Callable[[], bool], stall_s: float) -> tuple[str, str]:
        """What became of one attempt, and why it failed; `go_on` is asked again and again."""
        began = time.perf_counter()
        aside = folder_to_write(self.folder, snapshot.step, f"{self._token}-{next(self._attempts)}")
        parts = self.group.gather(self._write_part(snapshot, staged, aside, go_on))
        outcome, message = _verdict(parts)
        if outcome == SAVED and self.process.is_first:
            files = {name: FileFacts(*facts) for part in parts for name, facts in part["files"].items()}
            message = self._commit(snapshot, aside, files)
        if outcome == SAVED and (message := self.group.from_first(message)):
            outcome = FAILED
        if self.process.is_first and outcome == SAVED:
            self._tell_of(snapshot, parts, stall_s, time.perf_counter() - began)
            self.retain()
        elif self.process.is_first:
            shutil.rmtree(aside, ignore_errors=True)
        return outcome, message

    def _write_part(self, snapshot: Snapshot, staged: Staged, aside: Path, go_on: Callable[[], bool]) -> dict[str, Any]:
        """This worker's files, and what the others must know of them."""
        rank = self.process.rank
        texts = {worker_name(rank): json.dumps(snapshot.own)}
        if self.process.is_first:
            texts |= {"state.json": json.dumps(snapshot.values), "recipe.yaml": self.recipe}
        try:
            learned = staged.tensors.keys() & snapshot.finite
            check_finite((block for name in learned for block in staged.tensors[name]), go_on)
            aside.mkdir(parents=True, exist_ok=True)
            files = {shard_name(rank): write_file(aside / shard_name(rank), shard_chunks(staged), go_on)}
            for name, text in texts.items():
                files[name] = write_file(aside / name, [text.encode()], go_on)
        except CancelledError:
            return {"outcome": SUPERSEDED, "message": ""}
        except NotFiniteError:
            return {"outcome": NOT_FINITE, "message": ""}
        except OSError as error:
            return {"outcome": FAILED, "message": error.strerror or str(error)}
        return {
            "outcome": SAVED,
            "message": "",
            "holds": _held_in_short(snapshot.tensors, self.process.world_size),
            "files": {name: [facts.num_bytes, facts.xxh3_128] for name, facts in files.items()},
        }

    def _commit(self, snapshot: Snapshot, aside: Path, files: dict[str, FileFacts]) -> str:
        """Make the parts of all workers one checkpoint; what went wrong, in words, or nothing."""
        manifest = Manifest(
            step=snapshot.step,
            epoch=snapshot.epoch,
            metrics=dict(snapshot.metrics),
            time=time.time(),
            world_size=self.process.world_size,
            strategy=self.strategy,
            files=files,
            versions={"shoal": VERSION, "torch": torch.__version__},
        )
        try:
            commit(aside, self.folder, manifest)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _tell_of(self, snapshot: Snapshot, parts: list[dict[str, Any]], stall_s: float, seconds: float) -> None:
        num_bytes = sum(num_bytes for part in parts for num_bytes, _ in part["files"].values())
        facts = {"bytes": num_bytes, "stall_s": round(stall_s, 4), "seconds": round(seconds, 3)}
        self.tell("save", {"step": snapshot.step, "path": str(self.folder / step_name(snapshot.step)), **facts})

    def retain(self) -> None:
        """Delete what need not be kept, unless somebody reads it just now."""
        for old in to_delete(list_checkpoints(self.folder), self.settings, self.in_use()):
            try:
                delete_checkpoint(old.path)  # unless somebody reads it: then with the next save
            except OSError as error:
                self.tell("warning", {"message": f"an old checkpoint could not be deleted: {error}"})


def _verdict(parts: list[dict[str, Any]]) -> tuple[str, str]:
    """One outcome of all workers': the worst, and the first message."""
    for outcome in (NOT_FINITE, FAILED, SUPERSEDED):
        for rank, part in enumerate(parts):
            if part["outcome"] == outcome:
                who = f"worker {rank}: " if len(parts) > 1 else ""
                return outcome, f"{who}{part['message']}"
    told: dict[str, list[tuple[int, str]]] = {}
    for part in parts:
        for holders, (count, names) in part["holds"].items():
            told.setdefault(holders, []).append((count, names))
    if any(len(set(each)) > 1 or each[0][0] != len(each) for each in told.values()):
        # Each has written its share of what it holds, so some tensors would be there in part, or twice.
        raise RunError(
            "the workers hold different tensors, so no checkpoint can be made of them; build the same on all"
        )
    return SAVED, ""


def _held_in_short(tensors: Mapping[str, Held], world_size: int) -> dict[str, tuple[int, str]]:
    """Workers that hold something together -> how many they are, and what it is: the same on each of them."""
    told: dict[str, tuple[int, list[str]]] = {}
    for name, held in sorted(tensors.items()):
        if isinstance(held, FlatPart):
            continue  # on this worker alone; whether there are all parts of it shows when it is read
        holders, count = "all", world_size
        if is_distributed(held):
            ranks = held.device_mesh.mesh.flatten().tolist()
            holders, count = xxhash.xxh3_64_hexdigest(str(ranks).encode()), len(ranks)
        told.setdefault(holders, (count, []))[1].append(f"{name} {held.dtype} {tuple(held.shape)}")
    return {
        holders: (count, xxhash.xxh3_128_hexdigest("\n".join(names).encode()))
        for holders, (count, names) in told.items()
    }
