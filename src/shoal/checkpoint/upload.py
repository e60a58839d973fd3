"""Checkpoints copied to a store while training goes on: each worker uploads its own files, the manifest goes last.

One at a time. While one is on its way, newer ones wait, and of those only the newest goes next. What fails is told and
tried again; the checkpoint stays where it is, in the run's folder.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.checkpoint.folder import read_info, step_name, step_of
from shoal.checkpoint.manifest import MANIFEST, CorruptCheckpointError
from shoal.checkpoint.retention import to_delete
from shoal.checkpoint.section import CheckpointSection
from shoal.checkpoint.store import list_remote, remote_of
from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.core.remote import RemoteError

_LONGEST_DELAY_S = 30.0
_LOOK_EVERY_S = 0.2


class Uploader:
    """One worker's side of the uploads of a run. Every worker must add the same steps."""

    def __init__(
        self, folder: Path, settings: CheckpointSection, process: Process, tell: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.process = process
        self.tell = tell
        self.remote = remote_of(folder.parent.name, settings)
        self.group = process.group.sibling()
        self.failures = 0
        """In a row."""
        self.last_failure = ""
        self._waiting: list[int] = []
        self._present: int | None = None
        self._changed = threading.Condition()
        self._gives_up = False
        self._may_be_unfinished = True
        """An upload of an earlier start of the run may have been cut off in the middle of a file."""
        self.error: BaseException | None = None
        """What nobody has foreseen."""
        self._thread: threading.Thread | None = None

    def add(self, step: int) -> None:
        """Upload a checkpoint that is committed; the newest one waiting goes first, and alone."""
        with self._changed:
            self._waiting.append(step)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._carry_on, name="upload", daemon=True)
                self._thread.start()

    def add_if_missing(self, step: int) -> None:
        """Upload a checkpoint that a run goes on from, if an earlier end of the run came before it was there."""

        def is_missing() -> bool:
            try:
                return step not in [info.step for info in list_remote(self.remote)]
            except (RemoteError, UserError):
                return True  # told of when it is tried

        if self.process.group.from_first(is_missing() if self.process.is_first else False):
            self.add(step)

    def in_use(self) -> set[int]:
        """Steps that must not be deleted: the one on its way, and those that may be next."""
        with self._changed:
            # Other workers may not have heard of the newest yet, and would then choose the one before.
            return {*self._waiting[-2:], *(() if self._present is None else (self._present,))}

    def finish(self, alive: Callable[[], object]) -> None:
        """Wait until the newest checkpoint is there, or could not be brought there for too long.

        `alive` is asked again and again; if it gives a reason to stop, what fails is not tried again.
        """
        began = time.monotonic()
        with self._changed:
            while self._is_busy() and self.error is None:
                self._changed.wait(_LOOK_EVERY_S)
                # Whoever stops the run does not want to wait: the checkpoint is in the run's folder.
                self._gives_up = bool(alive()) or time.monotonic() - began > self.settings.give_up_after_s
                if self._gives_up:
                    self._changed.notify_all()
        if self.error is not None:
            raise self.error
        if self.failures:
            left = f"the newest checkpoint is in {self.folder} alone, and not in {self.remote.url}: {self.last_failure}"
            self.tell("warning", {"message": left})

    def _is_busy(self) -> bool:
        return bool(self._waiting) or self._present is not None

    # In the background.

    def _carry_on(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                    newest, gives_up = self._waiting[-1], self._gives_up and self.failures > 0
                # Workers hear of a checkpoint one after the other: what all have heard of is uploaded.
                said = self.group.gather([newest, gives_up])
                self._choose(None if any(gives_up for _, gives_up in said) else min(newest for newest, _ in said))
                if self._present is not None:
                    self._note(self._present, self._upload(self._present))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that trains
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _choose(self, step: int | None) -> None:
        """This one is next, and older ones have had their chance; None: there is no next."""
        with self._changed:
            self._present = step
            self._waiting = [] if step is None else [other for other in self._waiting if other > step]
            self._changed.notify_all()

    def _note(self, step: int, message: str) -> None:
        """Tell what became of an upload; after a failure, wait before the next."""
        if self.failures and not message:
            self.tell("upload_recovered", {"step": step})
        with self._changed:
            self.failures, self.last_failure = (self.failures + 1, message) if message else (0, "")
            if message and not self._waiting:
                self._waiting.append(step)
            self._present = None
            self._changed.notify_all()
        if message:
            self.tell("upload_failed", {"step": step, "message": message, "failures_in_a_row": self.failures})
            with self._changed:
                self._changed.wait_for(lambda: self._gives_up, min(2.0 ** (self.failures - 1), _LONGEST_DELAY_S))

    def _upload(self, step: int) -> str:
        """Bring one checkpoint to the store; what went wrong, in words, or nothing. The same on every worker."""
        began = time.monotonic()
        path = self.folder / step_name(step)
        message = self.group.from_first(self._in_words(self._clear, path.name) if self.process.is_first else "")
        if not message:
            message = next(filter(None, self.group.gather(self._in_words(self._upload_part, path))), "")
        if not message:
            message = self.group.from_first(self._in_words(self._commit, path, began) if self.process.is_first else "")
        return str(message)

    def _in_words(self, action: Callable[..., None], *arguments: Any) -> str:
        """What went wrong, or nothing."""
        try:
            action(*arguments)
        except (RemoteError, OSError, CorruptCheckpointError, UserError) as error:
            return str(error)
        return ""

    def _upload_part(self, path: Path) -> None:
        names = sorted(read_info(path).manifest.files)
        for name in names[self.process.rank :: self.process.world_size]:
            self.remote.put(path / name, f"{path.name}/{name}")

    def _clear(self, present: str) -> None:
        """Remove what earlier uploads left without an end: what has no manifest there is no checkpoint."""
        if self._may_be_unfinished or self.failures:
            self._may_be_unfinished = False
            try:
                self.remote.abort_unfinished()
            except RemoteError as error:  # not everybody may: it costs money, and nothing else
                self.tell("warning", {"message": str(error)})
        self.remote.delete(f"{present}/{MANIFEST}")
        for name in self.remote.names(""):
            if name != present and name.startswith("step-") and MANIFEST not in self.remote.names(name):
                self.remote.delete(name)

    def _commit(self, path: Path, began: float) -> None:
        self.remote.put(path / MANIFEST, f"{path.name}/{MANIFEST}")
        facts = {"to": f"{self.remote.url}/{path.name}", "seconds": round(time.monotonic() - began, 3)}
        self.tell("upload", {"step": step_of(path), **facts})
        try:
            # Newer ones than this are of a past that was given up, and count for nothing.
            known = [info for info in list_remote(self.remote) if info.step <= step_of(path)]
            for old in to_delete(known, self.settings, in_use=[step_of(path)]):
                self.remote.delete(f"{old.path.name}/{MANIFEST}")  # from here on it is no checkpoint
                self.remote.delete(old.path.name)
        except (RemoteError, UserError) as error:
            self.tell("warning", {"message": f"an old checkpoint could not be deleted: {error}"})
