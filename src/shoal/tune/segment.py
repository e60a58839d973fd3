"""A trial from one start to its next end: a run of Shoal, in a thread that watches over its workers."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import NoRoomError, RunError, UserError, WorkerError
from shoal.launch.gang import Gang
from shoal.launch.run import Launch, Prepared
from shoal.observe.records import Report
from shoal.tune.slots import Slot
from shoal.tune.trial import DIVERGED

_GIVE_UP_S = 120.0
"""A trial whose place is not whole for so long lets others have it."""


_TOLD = frozenset("failure restart resize preemption hang warning checkpoint_rejected save_failed".split())
"""Events of a run that whoever watches the search wants to know."""


@dataclass(frozen=True)
class Message:
    """What a segment tells its search."""

    trial: int
    what: str
    """report, first_step, note, ended"""
    fields: dict[str, Any]


Send = Callable[[Message], None]


class Segment:
    """One start of a trial. What it has to say comes as messages, the last of which is `ended`."""

    def __init__(
        self,
        trial: int,
        prepared: Prepared,
        slot: Slot,
        threads: int,
        until: float | None,
        address: str | None,
        send: Send,
    ) -> None:
        self.trial = trial
        self.slot = slot
        self.began = time.time()
        self.until = until
        self.step = 0
        """The last step that was heard of."""
        self.from_step: int | None = None
        """The step that it started from."""
        self.steps_per_epoch: float | None = None
        self._prepared = prepared
        self._threads = threads
        self._address = address
        self._send = send
        self._stop: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"trial-{trial}", daemon=True)
        self._thread.start()

    def stop(self, reason: str) -> None:
        """Have it save and end; the first reason counts."""
        self._stop = self._stop or reason

    def join(self) -> None:
        """Wait until nothing of it runs."""
        self._thread.join()

    def made(self) -> tuple[int, float]:
        """Steps, and epochs, that it has trained."""
        steps = max(0, self.step - (self.from_step or 0)) if self.from_step is not None else 0
        return steps, steps / self.steps_per_epoch if self.steps_per_epoch else 0.0

    def _run(self) -> None:
        how = Launch(
            console=self,
            stop=lambda: self._stop,
            started=self.began,
            launcher="ray" if self._address is None else "auto",
            address=self._address,
            give_up_s=_GIVE_UP_S,
            pause_at=self.until,
        )
        hide = self._prepared.loaded.hide
        try:
            summary = Gang(self._prepared, how, self.slot.crew, self.slot.size, self._threads).run()
            ending = {"status": summary["status"], "ended_by": summary.get("ended_by"), "summary": summary}
        except KeyboardInterrupt:  # before there was anything to save
            ending = {"status": "interrupted", "ended_by": self._stop, "summary": {}}
        except NoRoomError as error:
            ending = {"status": "left", "reason": hide(str(error))}
        except (UserError, RunError) as error:
            trace = hide(error.trace) if isinstance(error, WorkerError) else ""
            ending = {"status": "failed", "kind": _kind(error), "reason": hide(str(error)), "traceback": trace}
        except Exception as error:  # noqa: BLE001 - of Ray, which may be going: no fault of the trial's
            ending = {"status": "left", "reason": hide(f"{type(error).__name__}: {error}"), "is_broken": True}
        self._send(Message(self.trial, "ended", ending))

    def report(self, report: Report) -> None:
        """As `Observer`."""
        if report.epoch:
            self.steps_per_epoch = report.step / report.epoch
        self.step = max(self.step, report.step)
        self._send(Message(self.trial, "report", {"report": report}))

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """As `Observer`."""
        if name == "start" and isinstance(fields.get("step"), int):
            if self.from_step is None:
                self.from_step = fields["step"]
            self.step = fields["step"]
        if name in _TOLD:
            self._send(Message(self.trial, "note", {"name": name, "fields": fields}))

    def tick(self, step: int) -> None:
        """As `Observer`."""
        if self.from_step is not None and self.step == self.from_step and step > self.step:
            self._send(Message(self.trial, "first_step", {"seconds": round(time.time() - self.began, 3)}))
        self.step = max(self.step, step)


def _kind(error: Exception) -> str:
    """How it failed, in a word."""
    if isinstance(error, WorkerError):
        return "exception"
    if isinstance(error, UserError):
        return "refused"
    cause = getattr(error, "cause", "")
    return {"DivergedError": DIVERGED, "NoMemoryError": "memory"}.get(cause, cause.lower() or "run")
