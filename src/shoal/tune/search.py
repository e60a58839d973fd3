"""The search itself: proposes trials, gives them places, and does with them what the scheduler says.

Everything that happens is an event. It is written to the journal, applied to the trials, and only then acted upon; so a
search that is killed at any moment goes on from its journal.
"""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.core.errors import RunError, UserError
from shoal.core.section import one_of
from shoal.observe.records import Report
from shoal.observe.runs import read_metrics
from shoal.tune.adopt import DamagedError, adopt
from shoal.tune.endings import STOPPED, end_event, kept
from shoal.tune.failures import too_many_failures
from shoal.tune.folder import SearchFolder
from shoal.tune.journal import Journal
from shoal.tune.schedulers.moves import Exploit, Go, Move
from shoal.tune.segment import Message, Segment
from shoal.tune.setup import Setup
from shoal.tune.slots import Slot, Slots
from shoal.tune.starting import prepared_run, prune
from shoal.tune.trial import SAME, Result, Trial, apply, fold
from shoal.tune.watching import View

_LOOK_EVERY_S = 0.5
_OF_ALL = ("task", "data")
"""Sections of a recipe: where a trial cannot start because of one that is not searched over, no other can."""
_NO_ROOM_S = 600.0
"""How long a search waits for room while nothing runs."""


class Search:
    """One search, from its journal to its end."""

    def __init__(
        self,
        setup: Setup,
        folder: SearchFolder,
        journal: Journal,
        slots: Slots,
        threads: int,
        view: View,
        stop: Callable[[], str | None],
        on_first_step: Callable[[], None] = lambda: None,
        on_ended: Callable[["Search"], None] = lambda search: None,
        address: str | None = None,
        extra: dict[str, Any] | None = None,
        retry_failed: bool = False,
        began: float | None = None,
    ) -> None:
        """`extra`: fields that every trial's recipe gets besides. `retry_failed`: start again what has failed. `began`:
        when this process was asked to search, in unix seconds."""
        self.setup = setup
        self.folder = folder
        self.trials: dict[int, Trial] = {}
        self.segments: dict[int, Segment] = {}
        self.failure: str | None = None
        """Why the search ends before all trials have."""
        self.refusal: str | None = None
        """Why no trial can start, whatever its settings: the user's input is wrong."""
        self._journal = journal
        self._slots = slots
        self._threads = threads
        self._view = view
        self._stop = stop
        self._on_first_step = on_first_step
        self._on_ended = on_ended
        self._address = address
        self._extra = extra or {}
        self._retry_failed = retry_failed
        self._began = time.time() if began is None else began
        self._messages: queue.Queue[Message] = queue.Queue()
        self._scheduler = setup.scheduler()
        self._proposer = setup.proposer()
        self._idle_since: float | None = None
        self._has_trained = False
        """Whether any trial has in this process."""
        self._seen: set[str] = set()
        """Metrics that any trial has reported."""
        self._broken: dict[int, int] = {}
        """How often in a row a trial's launcher has broken."""

    def run(self) -> None:
        """Search until all trials have ended, somebody stops it, or too many have failed."""
        self.trials = fold(self._journal.read())
        self._note("start", num_trials=self.setup.num_trials, began=round(self._began, 3))
        if self._retry_failed and (failed := [t.number for t in self.trials.values() if t.status == "failed"]):
            self._note("retry", trials=failed)
        for trial in list(self.trials.values()):
            self._catch_up(trial)
        try:
            while self._go_on():
                self._view.show(self)
                self._take_messages()
        finally:
            self._end_all()
            self._view.show(self)

    def _end_all(self) -> None:
        """Have all trials save and end, and wait for that, also where it can no longer be written down."""
        for segment in self.segments.values():
            segment.stop("SIGTERM")
        refused: RunError | None = None
        while self.segments:
            try:
                self._take_messages()
            except RunError as error:
                refused = error
        if refused is not None:
            raise refused

    @property
    def stopped_by(self) -> str | None:
        """The signal by which somebody has stopped it."""
        return self._stop()

    @property
    def expects_more(self) -> bool:
        """Whether trials are still to be proposed."""
        return len(self.trials) < self.setup.num_trials

    def _go_on(self) -> bool:
        """Decide and start what can be; False if there is nothing left to wait for."""
        reason = self._stop() or self.failure or self.refusal
        if reason is None:
            self.failure = reason = too_many_failures(
                list(self.trials.values()), self.setup.num_trials, self.setup.section.max_failed
            )
        if reason is not None:
            for segment in self.segments.values():
                segment.stop("SIGTERM" if self.failure or self.refusal else reason)
            return bool(self.segments)
        self._decide()
        self._slots.trim()
        while self._start_some():  # some ended before they could start, which others may have waited for
            self._decide()
        if self.segments:
            self._idle_since = None
            return True
        if not self._has_work():
            if paused := [trial.number for trial in self.trials.values() if trial.status == "paused"]:
                self.failure = (
                    f"the scheduler left trials {', '.join(map(str, paused))} paused; this is a bug of Shoal's"
                )
            return False
        return self._wait_for_room()

    def _has_work(self) -> bool:
        return self.expects_more or any(trial.status == "waiting" for trial in self.trials.values())

    def _wait_for_room(self) -> bool:
        self._idle_since = self._idle_since or time.monotonic()
        if time.monotonic() - self._idle_since > _NO_ROOM_S:
            obstacle = self._slots.obstacle() or "the cluster is full"
            self.failure = f"waited {_NO_ROOM_S:.0f} s for room for a trial: {obstacle}"
            return False
        return True

    # Decisions

    def _decide(self) -> None:
        """What the scheduler says of trials that are paused, or were to be stopped when the search was."""
        for trial in [trial for trial in self.trials.values() if trial.status == "waiting" and trial.stop is not None]:
            self._note("ended", trial=trial.number, status=STOPPED, reason=trial.stop)
        # Those who take over do so before anybody goes on: one event tells of all. Others may have waited for them.
        while made := self._prepare_all(self._scheduler.moves(self.trials, self.expects_more)):
            self._note("moves", moves=made)

    def _prepare_all(self, moves: Sequence[Move]) -> list[dict[str, Any]]:
        return [record for move in moves if (record := self._prepare(move)) is not None]

    def _prepare(self, move: Move) -> dict[str, Any] | None:
        """Do what must be done before a move is written down; the move as it is written, if it is made."""
        if isinstance(move, Go):
            return {"move": "go", "trial": move.trial}
        if not isinstance(move, Exploit):
            return {"move": "stop", "trial": move.trial, "reason": move.reason}
        donor, trial, config = self.trials[move.donor], self.trials[move.trial], move.config
        try:
            recipe = self.setup.recipe_of(config, self._extra)
        except UserError:  # such settings do not go together: those of the donor do
            config = donor.config
            recipe = self.setup.recipe_of(config, self._extra)
        heir = Trial(trial.number, config, generation=trial.generation + 1)
        try:
            adopt(self.folder.run_dir(donor), donor.results[-1].step, self.folder.run_dir(heir), recipe)
        except DamagedError as error:  # the others need not suffer for that
            self._view.note(f"trial {trial.number} does not take over: {error}")
            return {"move": "go", "trial": trial.number} if trial.status == "paused" else None
        taken = {"from": move.donor, "progress": donor.progress, "config": config}
        return {"move": "exploit", "trial": move.trial, **taken}

    # Trials that start

    def _start_some(self) -> bool:
        """Give places to trials: those that have begun first, then new ones. Whether any ended at once instead."""
        some_ended = False
        while True:
            waiting = [trial for trial in self.trials.values() if trial.status == "waiting"]
            left = len(waiting) + self.setup.num_trials - len(self.trials)
            if not left or (slot := self._slots.take(left + len(self.segments))) is None:
                return some_ended
            trial = min(waiting, key=lambda trial: (trial.starts == 0, trial.number), default=None) or self._propose()
            if not self._start(trial, slot):
                self._slots.give_back(slot)
                some_ended = True

    def _propose(self) -> Trial:
        number = len(self.trials)
        self._note("trial", trial=number, config=self._proposer.propose(number, self.trials))
        return self.trials[number]

    def _start(self, trial: Trial, slot: Slot) -> bool:
        """Start a trial there; False where it has ended before it could."""
        run_dir = self.folder.run_dir(trial)
        try:
            prepared = prepared_run(self.setup, trial, run_dir, self._extra)
        except UserError as error:
            self._note(
                "ended", trial=trial.number, status="failed", kind="refused", reason=self.setup.base.hide(str(error))
            )
            return False
        if prepared.finished is not None:  # while nobody listened
            self._note("ended", trial=trial.number, status="done", summary=kept(prepared.finished))
            return False
        until = trial.until if trial.until is not None else self._scheduler.until(trial)
        self._note("run", trial=trial.number, until=until)
        self.segments[trial.number] = Segment(
            trial.number, prepared, slot, self._threads, until, self._address, self._messages.put
        )
        return True

    # News

    def _take_messages(self) -> None:
        """Wait for news, and take all that there is."""
        try:
            self._take(self._messages.get(timeout=_LOOK_EVERY_S))
            while True:
                self._take(self._messages.get_nowait())
        except queue.Empty:
            return

    def _take(self, message: Message) -> None:
        trial = self.trials[message.trial]
        if message.what == "report":
            self._take_report(trial, message.fields["report"])
        elif message.what == "first_step":
            self._has_trained = True
            self._on_first_step()
            self._note("first_step", trial=trial.number, **message.fields)
        elif message.what == "note":
            self._note("note", trial=trial.number, name=message.fields["name"], fields=message.fields["fields"])
            if message.fields["name"] == "restart":
                self._catch_up(trial)  # what it wrote down, and was killed before anybody heard it
        else:
            self._take_end(trial, message.fields)

    def _take_report(self, trial: Trial, report: Report) -> None:
        self._check_reported(report.metrics)
        self._add_result(trial, report.step, report.epoch, report.metrics)
        segment = self.segments.get(trial.number)
        if trial.stop is not None and segment is not None:
            segment.stop(STOPPED)

    def _add_result(
        self, trial: Trial, step: int, epoch: float, metrics: dict[str, Any], is_pause: bool = False
    ) -> None:
        """Write down an evaluation, and what the scheduler says to it, in one line; a pause is one in any case."""
        names = [objective.metric for objective in self.setup.objectives if not objective.is_of_end]
        if trial.stop is not None:  # what it does until it hears of that counts no more
            return
        if trial.results and step <= trial.results[-1].step:
            return
        if not is_pause and (not names or names[0] not in metrics):
            return
        before = trial.results[-1].metrics if trial.results else {}
        known = {name: before[name] for name in names if name in before}
        progress = round(epoch, 6) if self.setup.unit == "epochs" else float(step)
        # As it would be: nothing is so before it is written down.
        then = replace(trial, results=[*trial.results, Result(step, progress, known | metrics)])
        stop = self._scheduler.verdict(then, {**self.trials, trial.number: then})
        self._note("result", trial=trial.number, step=step, progress=progress, metrics=known | metrics, stop=stop)

    def _catch_up(self, trial: Trial) -> None:
        """What a trial has written to its folder, and nobody has heard; not beyond where it is to pause."""
        if trial.is_ended or trial.status == "paused":
            return
        for record in read_metrics(self.folder.run_dir(trial)):
            if trial.until is None or trial.progress < trial.until - SAME:
                self._add_result(trial, record["step"], record.get("epoch", 0.0), record["metrics"])

    def _take_end(self, trial: Trial, ending: dict[str, Any]) -> None:
        segment = self.segments.pop(trial.number)
        segment.join()
        if ending["status"] == "failed" and self._concerns_all(ending):
            self.refusal = self.refusal or str(ending["reason"])
            ending = {"status": "left", "reason": ending["reason"]}  # to be started when that is mended
        self._slots.give_back(segment.slot, is_whole=ending["status"] != "left")
        if ending["status"] == "done":  # before it heard that it was to stop
            trial.stop = None
        self._catch_up(trial)
        summary = ending.get("summary", {})
        self._broken[trial.number] = self._broken.get(trial.number, 0) + 1 if ending.get("is_broken") else 0
        event, fields = end_event(ending, trial.stop, self._broken[trial.number])
        if event == "paused":
            self._add_result(trial, summary["step"], summary["epoch"], summary["metrics"], is_pause=True)
        steps, epochs = segment.made()
        made = epochs if self.setup.unit == "epochs" else steps
        self._note(event, trial=trial.number, **fields, busy_s=round(time.time() - segment.began, 3), made=made)
        self._check_reported(summary.get("metrics", {}))
        prune(self.trials, self.setup, self.folder.path)
        self._on_ended(self)

    def _concerns_all(self, ending: Mapping[str, Any]) -> bool:
        """Whether a trial could not start for what is the same for all: the task, or the data, is not there."""
        section = str(ending.get("reason", "")).partition(".")[0]
        is_searched = any(key.startswith(f"{section}.") for key in self.setup.space.keys)
        return ending.get("kind") == "refused" and section in _OF_ALL and not is_searched and not self._has_trained

    def _check_reported(self, metrics: Mapping[str, Any]) -> None:
        """End a search by a metric that nobody reports, when the first evaluation shows it."""
        self._seen.update(metrics)
        wanted = next((o.metric for o in self.setup.objectives if not o.is_of_end), None)
        if wanted is not None and wanted not in self._seen and any(name.startswith("val_") for name in metrics):
            self.failure = f"tune.metric: {wanted!r} is not reported; {one_of(wanted, self._seen)}"

    def _note(self, event: str, **fields: Any) -> None:
        """Write down, apply."""
        apply(self.trials, self._write(event, **fields))

    def _write(self, event: str, **fields: Any) -> dict[str, Any]:
        record = self._journal.add(event, **fields)
        self._view.event(record)
        return record
