"""Following a run's folder: what is new there goes to a sink, and what the sink does not take now stays for later."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.core.secrets import scrub
from shoal.observe.track.facts import Facts, read_facts
from shoal.observe.track.points import points_of_report, points_of_workers, unsent
from shoal.observe.track.progress import Progress
from shoal.observe.track.reasons import short_reason
from shoal.observe.track.sink import Sink
from shoal.observe.track.tail import Tail

_LONGEST_WAIT_S = 60.0
"""Between two attempts to reach a sink that is away."""
_AT_THE_END_S = 0.5
"""The same, when there is not much time left."""


@dataclass
class Follower:
    """One sink and how far it is. For a thread of its own: a sink that hangs holds up no other."""

    name: str
    run_dir: Path
    progress: Progress
    make_sink: Callable[[], Sink]
    """May load packages, may raise, may hang."""
    every_s: float
    say: Callable[[str], None]
    """A line for the log."""
    hide: Callable[[str], str] = scrub
    """Takes secrets out of a text."""
    is_done: bool = False
    """Whether, after the end was asked for, nothing is left that the sink has not taken."""
    _sink: Sink | None = None
    _reports: Tail = field(init=False)
    _workers: Tail = field(init=False)
    _seen: tuple[object, ...] = ()
    _facts: Facts | None = None
    _told: Facts | None = None
    _ended: Facts | None = None

    def __post_init__(self) -> None:
        self.progress.problem = None  # another process had that one
        self._begin_anew()

    def _begin_anew(self) -> None:
        """With a sink that knows nothing of what went wrong, from where the files begin; what it has is left out."""
        self._sink = self._told = None
        self._reports, self._workers = (Tail(self.run_dir / f"{name}.jsonl") for name in ("metrics", "workers"))

    def run(self, ending: threading.Event, is_at_work: Callable[[], bool]) -> None:
        """Until `ending` is set and all is sent; where the sink does not take it, until the process is ended."""
        wait_s = self.every_s
        while True:
            is_last = ending.is_set()
            if self.sync(is_at_work()):
                wait_s = self.every_s
                if is_last:
                    self.close()
                    self.is_done = True
                    return
            else:
                wait_s = min(2 * wait_s, max(_LONGEST_WAIT_S, self.every_s))
            if ending.is_set():
                time.sleep(0 if not is_last else _AT_THE_END_S)
            else:
                ending.wait(wait_s)

    def sync(self, is_at_work: bool) -> bool:
        """Send what is new; whether the sink has taken it."""
        try:
            self._sync(is_at_work)
        except Exception as error:  # noqa: BLE001 - whatever a sink or its package raises: it is tried again
            words = self.hide(f"{self.progress.target}: {short_reason(error)}")
            if words != self.progress.problem:
                self.say(f"{self.name}: not sent, will try again: {words}")
            self.progress.problem = words
            self._begin_anew()
            self._save()
            return False
        if self.progress.problem is not None:
            self.say(f"{self.name}: sent")
            self.progress.problem = None
            self._save()
        return True

    def _sync(self, is_at_work: bool) -> None:
        if is_gone(self.run_dir):
            if not is_at_work:
                self._end_gone()
            return
        facts = self._read_facts(is_at_work)
        if facts.ended is not None and self._ended == facts:
            return
        if self._sink is None:
            self._sink = self.make_sink()
        if facts != self._told:
            self._sink.tell(facts)
            self._told = facts
            self.progress.complete = False
            self._save()
        while self._send_some(self._sink, facts):
            pass
        if facts.ended is not None:
            self._sink.end(facts)
            self._ended = facts
            self.progress.complete = True
            self._save()

    def _end_gone(self) -> None:
        """Where something was told of the run before it was taken away, it has an end."""
        if self._facts is None or self._facts == self._ended or (self._sink is None and not self.progress.ids):
            return
        if self._facts.ended is None:
            tags = self._facts.tags | {"shoal.status": "interrupted"}
            self._facts = replace(self._facts, status="interrupted", ended=time.time(), tags=tags)
        if self._sink is None:
            self._sink = self.make_sink()
        self._sink.tell(self._facts)
        self._sink.end(self._facts)
        self._ended = self._facts

    def _send_some(self, sink: Sink, facts: Facts) -> bool:
        """Some lines of both files, in the order of their steps; whether there were any."""
        reports = self._reports.read()
        steps = [step for record in reports if isinstance(step := record.get("step"), int)]
        # What is ahead of the reports comes with the next of them, or at the end.
        up_to = max(steps, default=-1) if reports or facts.ended is None else None
        workers = self._workers.read(up_to)
        points = [point for record in reports for point in points_of_report(record, facts.started)]
        points += [point for record in workers for point in points_of_workers(record, facts.started)]
        if found := unsent(sorted(points, key=lambda point: point.step), self.progress.last):
            sink.log(found)
            self.progress.last |= {point.name: point.step for point in found}
            if sink.keeps_at_once:
                self._save()
        return bool(reports or workers)

    def _read_facts(self, is_at_work: bool) -> Facts:
        """Read again only where something has changed."""
        seen = (is_at_work, *(_stamp(self.run_dir / name) for name in ("recipe.yaml", "events.jsonl", "summary.json")))
        if self._facts is None or seen != self._seen or not is_at_work:
            self._facts, self._seen = read_facts(self.run_dir, is_at_work), seen
        return self._facts

    def _save(self) -> None:
        """What the disk does not take now is kept in memory, and saved the next time."""
        with contextlib.suppress(OSError):
            self.progress.save()

    def close(self) -> None:
        """Let go of the sink."""
        if self._sink is not None:
            try:
                self._sink.close()
            except Exception as error:  # noqa: BLE001 - all was sent before
                self.say(f"{self.name}: {self.hide(short_reason(error))}")


def is_gone(run_dir: Path) -> bool:
    """Whether nothing is left of a run: one that is interrupted before its first step takes its folder with it."""
    return not any((run_dir / name).exists() for name in ("recipe.yaml", "events.jsonl"))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
