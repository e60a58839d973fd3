"""What a launcher makes of the messages of workers in other processes: shown, written down, summed up on failure."""

import contextlib
import shutil
import time
from typing import Any, NoReturn

from shoal.core.errors import RunError, UserError, WorkerError
from shoal.core.secrets import scrubbed
from shoal.launch.policy import Failure, Kind, is_retried
from shoal.launch.run import Launch, Prepared
from shoal.observe.ledger import read_ledger
from shoal.observe.records import Report
from shoal.observe.report import write_report
from shoal.observe.run_folder import RunFolder, append_event, event_record
from shoal.observe.runs import read_events, read_metrics, read_run, read_workers, resume_command

_LOCK_S = 2.0
"""How long a folder may stay locked by a worker that was killed."""


def failure_of(rank: int, node: str, message: dict[str, Any]) -> Failure:
    """What a worker said of its own failure."""
    kind: Kind = "network" if message["by_network"] else message["kind"]
    notes = tuple(message["notes"])
    return Failure(rank, kind, message["message"], node, message["traceback"], message["type"], notes)


class Account:
    """A run as its launcher knows it."""

    def __init__(self, prepared: Prepared, how: Launch) -> None:
        self.prepared = prepared
        self.how = how
        self.run_dir = prepared.run_dir.absolute()
        self.world_size: int | None = None
        self.restarts = 0
        self.saved_step: int | None = None
        self.first_step_s: float | None = None
        self._unwritten: list[dict[str, Any]] = []
        """What happened before there was a run to write it to."""

    def see(self, rank: int, message: dict[str, Any]) -> None:
        """Show a message that is for whoever watches; others are none of its business."""
        what = message["what"]
        if what == "print":
            self.how.console.event("print", {"rank": rank, "line": message["line"]})
        elif what == "report":
            self.how.console.report(Report.from_message(message["report"]))
        elif what == "event":
            if message["name"] == "save":
                self.saved_step = message["fields"]["step"]
            self.how.console.event(message["name"], message["fields"])
            self._write_events()
        elif what == "tick":
            self.first_step_s = self.first_step_s or time.time() - self.how.started
            self.how.console.tick(message["step"])

    def note(self, name: str, fields: dict[str, Any], is_shown: bool = True) -> None:
        """To the console, and to the run's events where there is a run; without what looks like a secret."""
        fields = scrubbed(fields)
        if is_shown:
            self.how.console.event(name, fields)
        self._unwritten.append(event_record(name, fields))
        self._write_events()

    def _write_events(self) -> None:
        path = self.run_dir / "events.jsonl"
        if self._unwritten and path.is_file():
            with contextlib.suppress(OSError):  # tried again with the next one
                while self._unwritten and append_event(path, self._unwritten[0]):
                    self._unwritten.pop(0)

    def note_failure(self, failure: Failure) -> None:
        """Which worker failed, and how. What ends the run is raised, and so is not shown here."""
        hide = self.prepared.loaded.hide
        fields = {"rank": failure.rank, "node": failure.node, "kind": failure.kind, "message": hide(failure.message)}
        if failure.type:
            fields |= {"type": failure.type, "traceback": hide(failure.traceback)}
        self.note("failure", fields, is_shown=is_retried(failure))

    def give_up(self, failure: Failure, message: str) -> NoReturn:
        """Raise what the user is to be told, after writing it down."""
        message = self.prepared.loaded.hide(message)
        is_run = (self.run_dir / "recipe.yaml").is_file()
        error: UserError | RunError
        if failure.kind == "exception":
            error = WorkerError(failure.rank, failure.node, failure.type, message, failure.traceback)
        else:
            error = UserError(message) if failure.kind == "user" and not is_run else RunError(message)
            for note in failure.notes:
                error.add_note(note)
        if isinstance(error, RunError):
            error.cause = failure.type or failure.kind
        if is_run:
            self.note("failed", {"error": failure.type or failure.kind, "message": message})
            self._write(self._summary("failed") | {"error": message})
        raise error

    def interrupted(self) -> dict[str, Any]:
        """The summary of a run that is stopped while no workers run; where it took no step, `KeyboardInterrupt`."""
        if not self.prepared.resume and self.first_step_s is None:
            self._remove_unused()
        if not (self.run_dir / "recipe.yaml").is_file():
            raise KeyboardInterrupt
        manifests = (self.run_dir / "checkpoints").glob("step-*/manifest.json")
        step = max((int(path.parent.name.removeprefix("step-")) for path in manifests), default=0)
        ending = {"step": step, "ended_by": self.how.stop(), "resume": resume_command(self.run_dir, self.how.asked)}
        summary = self._summary("interrupted") | ending
        self.note("interrupted", {"step": step})
        self._write(summary)
        return summary

    def _remove_unused(self) -> None:
        """Remove the folder that workers have made for a run without a step: they were killed, and left it."""
        if not (self.run_dir / ".lock").exists():
            return
        folder = RunFolder(self.run_dir)
        try:
            folder.lock(wait_s=_LOCK_S)
        except UserError:  # somebody else's, who trains there
            return
        try:
            if not any(event.get("event") in ("first_step", "save") for event in read_events(self.run_dir)):
                shutil.rmtree(self.run_dir, ignore_errors=True)
        finally:
            folder.close()

    def _summary(self, status: str) -> dict[str, Any]:
        """What the folder tells, where no worker is left to sum up."""
        run, reports = read_run(self.run_dir), read_metrics(self.run_dir)
        ledger = read_ledger(self.run_dir, until=time.time())
        last = (read_workers(self.run_dir) or [{}])[-1]
        return {
            "run": self.run_dir.name,
            "run_dir": str(self.run_dir),
            "status": status,
            "step": run.step,
            "epoch": reports[-1].get("epoch", 0.0) if reports else 0.0,
            "metrics": run.metrics,
            "weights_sha256": None,
            "samples_per_s": None,
            "time_to_first_step_s": self.first_step_s,
            "restarts": self.restarts,
            "resumed_from_step": None,
            "world_size": self.world_size,
            "goodput": round(ledger.goodput, 4),
            "bottleneck": last.get("bottleneck", "unknown"),
            "verdict": last.get("verdict", "unknown, because the workers did not end by themselves"),
            "ledger": ledger.to_record(self.prepared.loaded.recipe.cluster.price_per_hour),
        }

    def _write(self, summary: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the disk may be what failed
            RunFolder(self.run_dir).write_summary(summary)
        try:
            write_report(self.run_dir)
        except Exception as error:  # noqa: BLE001 - a page less, and how the run ended is told all the same
            self.note("warning", {"message": f"report.html could not be written: {error}"})
