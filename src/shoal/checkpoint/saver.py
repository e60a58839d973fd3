"""Saving while training goes on: a state is copied, and then written, hashed, committed and retained in the background.

Every worker saves at the same steps and writes its own part; rank 0 commits when all parts are safe on the disk. What
goes wrong is told, tried again and, if it stays wrong, ends the run; a checkpoint that was committed is never touched.
"""

import itertools
import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from shoal.checkpoint.folder import (
    commit,
    delete_checkpoint,
    folder_to_write,
    is_being_read,
    list_checkpoints,
    shard_name,
    step_name,
    worker_name,
)
from shoal.checkpoint.manifest import FileFacts, Manifest
from shoal.checkpoint.pieces import Division
from shoal.checkpoint.retention import to_delete
from shoal.checkpoint.section import CheckpointSection
from shoal.checkpoint.shard import CancelledError, NotFiniteError, check_finite, shard_chunks, write_file
from shoal.checkpoint.stage import Stage, Staged
from shoal.checkpoint.upload import Uploader
from shoal.core.errors import RunError, UserError
from shoal.core.process import Process
from shoal.core.version import VERSION

TROUBLE = "checkpoint_failures"
"""Why a run is stopped whose checkpoints can no longer be kept."""
_LONGEST_DELAY_S = 30.0
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class Snapshot:
    """What one worker has of a run at one step."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    """Validation metrics, where this step was evaluated."""
    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]
    """What there is once; rank 0's is written."""
    own: Mapping[str, Any]
    """What this worker alone has."""
    of_first: frozenset[str] = frozenset()
    """Tensors of which rank 0's are the ones that count."""
    finite: frozenset[str] = frozenset()
    """Tensors that must be finite: what is not would poison every resume."""


@dataclass
class _Flight:
    """A save on its way."""

    snapshot: Snapshot
    staged: Staged
    stall_s: float
    thread: threading.Thread | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    """A newer one takes its place."""
    give_up: threading.Event = field(default_factory=threading.Event)
    """If it fails, it is not tried again."""
    outcome: str = ""
    """saved, superseded, failed or not_finite: the same on every worker."""
    message: str = ""
    error: BaseException | None = None
    """What nobody has foreseen."""

    @property
    def is_over(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


class Saver:
    """The checkpoints of one run, as one of its workers sees them. Every worker must call the same methods."""

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSection,
        process: Process,
        *,
        strategy: str = "single",
        recipe: str = "",
        tell: Callable[[str, dict[str, Any]], None] = lambda name, fields: None,
        alive: Callable[[], object] = lambda: None,
        on_saved: Callable[[Path, Mapping[str, float]], None] = lambda path, metrics: None,
    ) -> None:
        """Args:
        folder: Where checkpoints go; the same for every worker.
        settings: What to keep, and what to bear.
        process: Which worker this is.
        strategy: Told in the manifest.
        recipe: The resolved recipe, kept with every checkpoint.
        tell: Given what happens, by name; called on rank 0 alone, in any thread.
        alive: Called again and again while training waits.
        on_saved: Called on every worker, in the thread that trains, once it is known that a checkpoint is committed.
        """
        self.folder = folder
        self.settings = settings
        self.process = process
        self.strategy = strategy
        self.recipe = recipe
        self.tell = tell if process.is_first else lambda name, fields: None
        self.alive = alive
        self.on_saved = on_saved
        self.group = process.group.sibling()
        self.uploader = Uploader(folder, settings, process, self.tell) if settings.upload_to else None
        # Nobody else writes into folders of this token, not even an earlier self that is still dying somewhere.
        self._token: str = process.group.from_first(secrets.token_hex(4))
        self._attempts = itertools.count()
        self._division = Division(process.rank, process.world_size)
        self._stage = Stage(process.device)
        self._flight: _Flight | None = None
        self._was_superseded = False
        self._failures = 0
        """Saves in a row that came to nothing."""
        self._last_failure = ""

    def save(self, snapshot: Snapshot) -> None:
        """Copy the state and see to the rest in the background. Waits for the save before, unless told otherwise."""
        began = time.perf_counter()
        self._make_way()
        staged = self._stage.take(self._division.pieces(snapshot.tensors, snapshot.of_first))
        flight = _Flight(snapshot, staged, round(time.perf_counter() - began, 4))
        flight.thread = threading.Thread(target=self._carry_out, args=(flight,), name="save", daemon=True)
        self._flight = flight
        flight.thread.start()

    def finish(self, with_uploads: bool = True) -> None:
        """Wait until everything is saved and uploaded; `RunError` if the last save has failed for good."""
        if (flight := self._flight) is not None:
            self._wait(flight, self.settings.give_up_after_s)
            self._take_in()
            if flight.outcome == "failed":
                raise RunError(
                    f"the checkpoint of step {flight.snapshot.step} could not be written to {self.folder}: "
                    f"{flight.message}; earlier checkpoints are untouched"
                )
        if self.uploader is not None and with_uploads:
            self.uploader.finish(self.alive)
            if self.process.is_first:
                self._retain()  # those that were kept to be uploaded

    def settle(self, timeout_s: float) -> None:
        """The run is failing for another reason: give a save that is on its way the time to end."""
        if self._flight is not None and self._flight.thread is not None:
            self._flight.give_up.set()
            self._flight.thread.join(timeout_s)

    def trouble(self) -> str | None:
        """Why the run should stop, or None."""
        flight = self._flight
        if flight is not None and flight.is_over and (flight.error is not None or flight.outcome == "not_finite"):
            return TROUBLE
        if self.uploader is not None and self.uploader.error is not None:
            return TROUBLE
        return TROUBLE if self.too_many_failures() else None

    def too_many_failures(self) -> str | None:
        """More saves or uploads in a row have failed than is borne: what happened, in words."""
        uploads = (self.uploader.failures, self.uploader.last_failure) if self.uploader else (0, "")
        for what, (count, last) in {"saves": (self._failures, self._last_failure), "uploads": uploads}.items():
            if count >= self.settings.max_failures:
                return f"{count} {what} of checkpoints failed in a row, the last one because: {last}"
        return None

    def report(self) -> dict[str, float]:
        """What belongs among a run's metrics: nothing, as long as all is well."""
        found = {"save_failures": self._failures, "upload_failures": self.uploader.failures if self.uploader else 0}
        return {name: float(count) for name, count in found.items() if count}

    # In the thread that trains.

    def _make_way(self) -> None:
        """Have the buffer to ourselves: wait for the save that is on its way, or call it off."""
        if self.uploader is not None and self.uploader.error is not None:
            raise self.uploader.error
        if (flight := self._flight) is None:
            return
        if self.settings.if_busy == "supersede" and not self._was_superseded:
            (busy,) = self.process.group.sum(float(not flight.is_over))
            if busy:
                flight.cancelled.set()
        flight.give_up.set()
        self._wait(flight)
        self._take_in()

    def _wait(self, flight: _Flight, give_up_after_s: float | None = None) -> None:
        began = time.monotonic()
        assert flight.thread is not None
        while not flight.is_over:
            flight.thread.join(_LOOK_EVERY_S)
            self.alive()
            if give_up_after_s is not None and time.monotonic() - began > give_up_after_s:
                flight.give_up.set()

    def _take_in(self) -> None:
        """See what became of a save."""
        flight, self._flight = self._flight, None
        assert flight is not None
        if flight.error is not None:
            raise flight.error
        if flight.outcome == "not_finite":
            raise RunError(
                f"the weights became infinite or nan by step {flight.snapshot.step}: lower optim.lr, raise "
                "optim.warmup_steps or set train.clip_norm=1.0"
            )
        self._was_superseded = flight.outcome == "superseded"
        if flight.outcome == "failed":
            self._failures, self._last_failure = self._failures + 1, flight.message
        elif flight.outcome == "saved":
            self._failures = 0
            self.on_saved(self.folder / step_name(flight.snapshot.step), flight.snapshot.metrics)

    # In the background.

    def _carry_out(self, flight: _Flight) -> None:
        try:
            for attempt in itertools.count():
                flight.outcome, flight.message = self._write_once(flight)
                if flight.outcome != "failed":
                    break
                self.tell("save_failed", {"step": flight.snapshot.step, "message": flight.message})
                flight.give_up.wait(min(2.0**attempt, _LONGEST_DELAY_S))
                if any(self.group.gather(flight.give_up.is_set())):
                    break
            if flight.outcome == "superseded":
                self.tell("save_superseded", {"step": flight.snapshot.step})
            if flight.outcome == "saved" and self.uploader is not None:
                self.uploader.add(flight.snapshot.step)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that trains
            flight.error = error

    def _write_once(self, flight: _Flight) -> tuple[str, str]:
        """What became of one attempt, and why; every worker comes to the same."""
        began = time.perf_counter()
        token = f"{self._token}-{next(self._attempts)}"
        aside = folder_to_write(self.folder, flight.snapshot.step, token)
        parts = self.group.gather(self._write_part(flight, aside))
        outcome, message = _verdict(parts)
        if outcome == "saved" and self.process.is_first:
            facts = {name: FileFacts(*facts) for part in parts for name, facts in part["files"].items()}
            message = self._commit(flight, aside, facts, began)
        if outcome == "saved" and (message := self.group.from_first(message)):
            outcome = "failed"
        if self.process.is_first and outcome != "saved":
            shutil.rmtree(aside, ignore_errors=True)
        return outcome, message

    def _write_part(self, flight: _Flight, aside: Path) -> dict[str, Any]:
        """This worker's files, and what the others must know of them."""
        snapshot, staged, rank = flight.snapshot, flight.staged, self.process.rank

        def go_on() -> bool:
            return not flight.cancelled.is_set()

        texts = {worker_name(rank): json.dumps(snapshot.own)}
        if self.process.is_first:
            texts |= {"state.json": json.dumps(snapshot.values), "recipe.yaml": self.recipe}
        try:
            check_finite((staged.tensors[name] for name in staged.tensors.keys() & snapshot.finite), go_on)
            aside.mkdir(parents=True, exist_ok=True)
            files = {shard_name(rank): write_file(aside / shard_name(rank), shard_chunks(staged), go_on)}
            for name, text in texts.items():
                files[name] = write_file(aside / name, [text.encode()], go_on)
        except CancelledError:
            return {"outcome": "superseded", "message": ""}
        except NotFiniteError:
            return {"outcome": "not_finite", "message": ""}
        except OSError as error:
            return {"outcome": "failed", "message": error.strerror or str(error)}
        return {
            "outcome": "saved",
            "message": "",
            "of": _names_in_short(snapshot.tensors),
            "files": {name: [facts.num_bytes, facts.xxh3_128] for name, facts in files.items()},
        }

    def _commit(self, flight: _Flight, aside: Path, files: dict[str, FileFacts], began: float) -> str:
        """Make the parts of all workers one checkpoint; what went wrong, in words, or nothing."""
        snapshot = flight.snapshot
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
            info = commit(aside, self.folder, manifest)
        except OSError as error:
            return error.strerror or str(error)
        seconds = round(time.perf_counter() - began, 3)
        facts = {"path": str(info.path), "bytes": info.num_bytes, "stall_s": flight.stall_s, "seconds": seconds}
        self.tell("save", {"step": info.step, **facts})
        self._retain()
        return ""

    def _retain(self) -> None:
        """Delete what need not be kept, unless somebody reads it just now."""
        in_use = self.uploader.in_use() if self.uploader else ()
        try:
            for old in to_delete(list_checkpoints(self.folder), self.settings, in_use):
                if not is_being_read(old.path):
                    delete_checkpoint(old.path)
        except (OSError, UserError) as error:
            self.tell("warning", {"message": f"an old checkpoint could not be deleted: {error}"})


def _verdict(parts: list[dict[str, Any]]) -> tuple[str, str]:
    """One outcome of all workers': the worst, and the first message."""
    for outcome in ("not_finite", "failed", "superseded"):
        for rank, part in enumerate(parts):
            if part["outcome"] == outcome:
                who = f"worker {rank}: " if len(parts) > 1 else ""
                return outcome, f"{who}{part['message']}"
    if len({part["of"] for part in parts}) > 1:
        # Each has written its share of what it holds, so some tensors would be there in part, or twice.
        raise RunError(
            "the workers hold different tensors, so no checkpoint can be made of them; build the same on all"
        )
    return "saved", ""


def _names_in_short(tensors: Mapping[str, torch.Tensor]) -> str:
    """The same for workers whose tensors have the same names and shapes."""
    told = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())]
    return xxhash.xxh3_128_hexdigest("\n".join(told).encode())
