"""Saving while training goes on: a state is copied, and then written, hashed, committed and retained in the background.

Every worker saves at the same steps and writes its own part; rank 0 commits when all parts are safe on the disk. What
goes wrong is told, tried again and, if it stays wrong, ends the run; a checkpoint that was committed is never touched.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.checkpoint.folder import step_name
from shoal.checkpoint.pieces import Division
from shoal.checkpoint.section import CheckpointSection
from shoal.checkpoint.stage import Stage, Staged
from shoal.checkpoint.upload import Uploader
from shoal.checkpoint.write import FAILED, NOT_FINITE, SAVED, SUPERSEDED, Snapshot, Writer
from shoal.core.errors import DivergedError, RunError
from shoal.core.process import Process

TROUBLE = "checkpoint_failures"
"""Why a run is stopped whose checkpoints can no longer be kept."""
_LONGEST_DELAY_S = 30.0
_LOOK_EVERY_S = 0.2
_PATIENCE_S = 0.5
"""How long a last save may take before people are told what is waited for, if it has failed until then."""


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
    """Of the last attempt."""
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
        self.tell = tell if process.is_first else lambda name, fields: None
        self.alive = alive
        self.on_saved = on_saved
        self.group = process.group.sibling()
        self.uploader = Uploader(folder, settings, process, self.tell) if settings.upload_to else None
        self._writer = Writer(
            folder,
            settings,
            process,
            self.group,
            strategy=strategy,
            recipe=recipe,
            tell=self.tell,
            in_use=self.uploader.in_use if self.uploader else set,
        )
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
        flight = _Flight(snapshot, staged, time.perf_counter() - began)
        flight.thread = threading.Thread(target=self._carry_out, args=(flight,), name="save", daemon=True)
        self._flight = flight
        flight.thread.start()

    def finish(self, with_uploads: bool = True) -> None:
        """Wait until everything is saved and uploaded; `RunError` if the last save has failed for good."""
        if (flight := self._flight) is not None:
            self._wait(flight, at_most_s=_PATIENCE_S)
            if not flight.is_over and flight.outcome == FAILED:
                self.tell("waiting_to_save", {"step": flight.snapshot.step, "for_s": self.settings.give_up_after_s})
            self._wait(flight, give_up_after_s=self.settings.give_up_after_s)
            self._take_in()
            if flight.outcome == FAILED:
                raise RunError(
                    f"the checkpoint of step {flight.snapshot.step} could not be written to {self.folder}: "
                    f"{flight.message}; earlier checkpoints are untouched"
                )
        if self.uploader is not None and with_uploads:
            self.uploader.finish(self.alive)
            if self.process.is_first:
                self._writer.retain()  # those that were kept to be uploaded

    def settle(self, timeout_s: float) -> None:
        """The run is failing for another reason: give a save that is on its way the time to end."""
        if self._flight is not None and self._flight.thread is not None:
            self._flight.give_up.set()
            self._flight.thread.join(timeout_s)

    def trouble(self) -> str | None:
        """Why the run should stop, or None."""
        flight = self._flight
        if flight is not None and flight.is_over and (flight.error is not None or flight.outcome == NOT_FINITE):
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

    def _wait(self, flight: _Flight, at_most_s: float = math.inf, give_up_after_s: float | None = None) -> None:
        began = time.monotonic()
        assert flight.thread is not None
        while not flight.is_over and time.monotonic() - began < at_most_s:
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
        if flight.outcome == NOT_FINITE:
            raise DivergedError(
                f"the weights became infinite or nan by step {flight.snapshot.step}: lower optim.lr, raise "
                "optim.warmup_steps or set train.clip_norm=1.0"
            )
        self._was_superseded = flight.outcome == SUPERSEDED
        if flight.outcome == FAILED:
            self._failures, self._last_failure = self._failures + 1, flight.message
        elif flight.outcome == SAVED:
            self._failures = 0
            self.on_saved(self.folder / step_name(flight.snapshot.step), flight.snapshot.metrics)

    # In the background.

    def _carry_out(self, flight: _Flight) -> None:
        try:
            failed = self._failures > 0
            for attempt in itertools.count():
                flight.outcome, flight.message = self._writer.write(
                    flight.snapshot, flight.staged, lambda: not flight.cancelled.is_set(), flight.stall_s
                )
                if flight.outcome != FAILED:
                    break
                self.tell("save_failed", {"step": flight.snapshot.step, "message": flight.message})
                failed = True
                flight.give_up.wait(min(2.0**attempt, _LONGEST_DELAY_S))
                if any(self.group.gather(flight.give_up.is_set())):
                    break
            if flight.outcome == SAVED and failed:
                self.tell("save_recovered", {"step": flight.snapshot.step})
            if flight.outcome == SUPERSEDED:
                self.tell("save_superseded", {"step": flight.snapshot.step})
            if flight.outcome == SAVED and self.uploader is not None:
                self.uploader.add(flight.snapshot.step)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that trains
            flight.error = error
