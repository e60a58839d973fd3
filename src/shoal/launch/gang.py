"""Many workers as one run: started together, watched, and started again from the last checkpoint when one is lost.

This runs in the launcher. It knows workers only as members of a crew, on this machine or on a Ray cluster alike, and
takes every decision by a function of `policy`.
"""

import contextlib
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import RunError, UserError, WorkerError
from shoal.launch import policy
from shoal.launch.crew import LOOPBACK, Crew, Member
from shoal.launch.environment import nccl_environment, referenced_environment
from shoal.launch.policy import Failure, Size
from shoal.launch.run import Launch, Prepared
from shoal.observe.records import Report
from shoal.observe.run_folder import RunFolder, append_event
from shoal.observe.runs import read_run

_POLL_S = 1.0
_ANSWER_S = 5.0
"""A member that does not answer within so long, while others fail, is lost."""
_SILENT_S = 20.0
"""A member that does not answer within so long is lost even if nobody else complains."""
_CAUSE_S = 5.0
"""How long to look for the cause, where all that is known is that connections broke."""
_SETTLE_S = 10.0
"""How long a run goes on before it is stopped to take in more workers."""
_START_S = 120.0
"""How long agents may take to come up, and a busy cluster to have room."""


@dataclass
class _Attempt:
    """The workers from one start to its end."""

    members: list[Member]
    started: float = field(default_factory=time.monotonic)
    polls: dict["Future[Any]", int] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)
    still_s: dict[int, float] = field(default_factory=dict)
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    failed_at: float | None = None
    stop_sent: str | None = None

    @property
    def waits_for_cause(self) -> bool:
        """Whether the failures so far are only what follows from another."""
        return all(failure.kind == "network" for failure in self.failures.values())


class Gang:
    """The launcher's side of a run with many workers."""

    def __init__(self, prepared: Prepared, how: Launch, crew: Crew, size: Size, threads: int | None) -> None:
        self.prepared = prepared
        self.how = how
        self.crew = crew
        self.size = size
        self.threads = threads
        self.recipe = prepared.loaded.recipe
        self.run_dir = prepared.run_dir.absolute()
        self.starts = 0
        self.restarts = 0
        self.in_a_row = 0
        self.saved_step: int | None = None
        self.saved_step_then: int | None = None
        self.first_step_s: float | None = None
        self.was_size: int | None = None

    def run(self) -> dict[str, Any]:
        """Train to the end, whatever happens to the workers, and return the summary."""
        while True:
            attempt = self._start(self._wait_for_members())
            try:
                summary = self._watch(attempt)
            finally:
                self._end(attempt)
            if summary is None:
                self._recover(attempt)
            elif summary.get("before_start"):
                raise KeyboardInterrupt
            elif summary.get("ended_by") not in ("preemption", "resize"):
                return summary
            self._leave_leaving(attempt)

    def _wait_for_members(self) -> list[Member]:
        """As many as there are, at least as many as the run needs; what is waited for is told every second."""
        began = time.monotonic()
        told = 0.0
        while True:
            if self.how.stop() is not None:
                raise KeyboardInterrupt
            ready = [member for member in self.crew.members() if member.node not in self.crew.leaving()]
            waited_s = time.monotonic() - began
            count = policy.size_to_start(len(ready), self.size, self.crew.expects_more())
            if count is not None:
                return ready[:count]
            if self.starts == 0 and self.how.wait_s == 0 and (obstacle := self.crew.obstacle()) is not None:
                raise UserError(
                    f"cluster.workers: {obstacle}; ask for fewer or smaller ones, or wait with --wait SECONDS"
                )
            limit_s = max(self.how.wait_s, _START_S) if self.starts == 0 else self.recipe.failures.machine_timeout_s
            if waited_s > limit_s:
                raise RunError(f"cluster.workers: waited {waited_s:.0f} s for {self.crew.waiting_for()}; given up")
            if waited_s - told >= 1.0 and waited_s > 2.0:
                told = waited_s
                left_s = round(limit_s - waited_s)
                self.how.console.event("waiting", {"for": self.crew.waiting_for(), "seconds_left": left_s})
            time.sleep(0.05)

    def _start(self, members: list[Member]) -> _Attempt:
        """Start a worker at each member."""
        if self.was_size is not None and self.was_size != len(members):
            self._note("resize", {"from": self.was_size, "to": len(members)})
        self.was_size = len(members)
        members = sorted(members, key=lambda member: [other.node for other in members].index(member.node))
        attempt = _Attempt(members)
        try:
            one_machine = len({member.node for member in members}) == 1
            host = LOOPBACK if one_machine else members[0].address
            port = members[0].call("open_port", host).result(_START_S)
            jobs = [self._job(rank, members, host, port) for rank in range(len(members))]
            starting = [member.call("start", job) for member, job in zip(members, jobs, strict=True)]
        except Exception as error:  # noqa: BLE001 - whatever keeps the first member from listening
            attempt.failures[0] = Failure(0, "lost", f"{type(error).__name__}: {error}", members[0].node)
            starting = []
        for rank, future in enumerate(starting):
            try:
                future.result(_START_S)
            except Exception as error:  # noqa: BLE001 - an agent that is gone, in whatever way
                attempt.failures[rank] = Failure(rank, "lost", f"{type(error).__name__}: {error}", members[rank].node)
        self.starts += 1
        if not attempt.failures:
            for rank in range(len(members)):
                self._poll(attempt, rank)
        return attempt

    def _job(self, rank: int, members: list[Member], host: str, port: int) -> dict[str, Any]:
        """What the trainer of `rank` is told; all of it plain values."""
        nodes = [member.node for member in members]
        loaded, nccl = self.prepared.loaded, self.recipe.nccl
        return {
            "recipe": loaded.tree(),
            "run_dir": str(self.run_dir),
            "resume": self.prepared.resume,
            "restarts": self.restarts,
            "starts": self.starts,
            "started": self.how.started,
            "first_step_s": self.first_step_s,
            "threads": self.threads,
            "node": members[rank].node,
            "address": LOOPBACK if len(set(nodes)) == 1 else members[rank].address,
            "local_rank": nodes[:rank].count(nodes[rank]),
            "local_world_size": nodes.count(nodes[rank]),
            "environment": nccl_environment(nccl) | referenced_environment(loaded),
            "directory": os.getcwd(),  # noqa: PTH109 - as a string
            "paths": [path for path in sys.path if path and "site-packages" not in path and Path(path).is_dir()],
            "meeting": {
                "rank": rank,
                "world_size": len(members),
                "host": host,
                "port": port,
                # The launcher notices a hang long before; torch's own limit is for when there is no launcher left.
                "timeout_s": nccl.timeout_s or 2 * self.recipe.failures.hang_timeout_s + 300,
            },
        }

    def _poll(self, attempt: _Attempt, rank: int) -> None:
        attempt.polls[attempt.members[rank].call("poll", _POLL_S)] = rank
        attempt.asked[rank] = time.monotonic()

    def _watch(self, attempt: _Attempt) -> dict[str, Any] | None:
        """Follow the workers to their end: rank 0's summary, or None if they failed."""
        while not attempt.failures:
            self._take_answers(attempt)
            if 0 in attempt.ended and (len(attempt.ended) == len(attempt.members) or attempt.failures):
                return attempt.ended[0]
            self._look_after(attempt)
        began = time.monotonic()
        while attempt.waits_for_cause and attempt.polls and time.monotonic() - began < _CAUSE_S:
            self._take_answers(attempt)
            self._find_lost(attempt, _ANSWER_S - 2.0)
        return None

    def _take_answers(self, attempt: _Attempt) -> None:
        done, _ = wait(attempt.polls, timeout=0.1, return_when=FIRST_COMPLETED)
        for future in done:
            rank = attempt.polls.pop(future)
            try:
                answer = future.result()
            except Exception as error:  # noqa: BLE001 - an agent that is gone, in whatever way
                self._fail(attempt, Failure(rank, "lost", str(error).splitlines()[0], attempt.members[rank].node))
                continue
            attempt.still_s[rank] = answer["still_s"]
            for message in answer["messages"]:
                if message["attempt"] == self.starts - 1:
                    self._take(attempt, rank, message)
            if rank not in attempt.ended and rank not in attempt.failures:
                self._poll(attempt, rank)

    def _take(self, attempt: _Attempt, rank: int, message: dict[str, Any]) -> None:
        """One message of a worker."""
        node, what = attempt.members[rank].node, message["what"]
        if what == "print":
            self.how.console.event("print", {"rank": rank, "line": message["line"]})
        elif what == "report":
            self.how.console.report(Report(**message["report"]))
        elif what == "event":
            self._see_event(message["name"], message["fields"])
        elif what == "tick":
            self.first_step_s = self.first_step_s or time.time() - self.how.started
            self.how.console.tick(message["step"])
        elif what == "ended":
            attempt.ended[rank] = message["summary"]
        elif what == "failed":
            kind: policy.Kind = "network" if message["by_network"] else message["kind"]
            self._fail(
                attempt,
                Failure(
                    rank,
                    kind,
                    message["message"],
                    node,
                    message["traceback"],
                    message["type"],
                    tuple(message["notes"]),
                ),
            )
        elif what == "died":
            self._fail(attempt, Failure(rank, "died", _in_words(message["status"]), node))

    def _see_event(self, name: str, fields: dict[str, Any]) -> None:
        if name == "save":
            self.saved_step = fields["step"]
        self.how.console.event(name, fields)

    def _fail(self, attempt: _Attempt, failure: Failure) -> None:
        attempt.failures.setdefault(failure.rank, failure)

    def _look_after(self, attempt: _Attempt) -> None:
        """Everything that may happen to workers that run."""
        self._find_lost(attempt, _SILENT_S)
        hung = policy.hung_ranks(attempt.still_s, self.recipe.failures.hang_timeout_s)
        if hung and not attempt.failures:
            self._note_hang(attempt, hung)
            return
        if attempt.stop_sent is None and (reason := self._reason_to_stop(attempt)) is not None:
            attempt.stop_sent = reason
            for member in attempt.members:
                member.call("stop", reason)

    def _reason_to_stop(self, attempt: _Attempt) -> str | None:
        if (signal_name := self.how.stop()) is not None:
            return signal_name
        leaving = self.crew.leaving() & {member.node for member in attempt.members}
        if leaving:
            self._note("preemption", {"nodes": sorted(leaving)})
            return "preemption"
        since_start_s = time.monotonic() - attempt.started
        ready = len(self.crew.members()) if self.size.is_elastic else len(attempt.members)
        more = policy.size_to_grow_to(len(attempt.members), ready, self.size, since_start_s, _SETTLE_S)
        return None if more is None else "resize"

    def _find_lost(self, attempt: _Attempt, silent_s: float) -> None:
        for rank in set(attempt.polls.values()):
            silence_s = time.monotonic() - attempt.asked[rank]
            if silence_s > _POLL_S + silent_s and rank not in attempt.failures:
                member = attempt.members[rank]
                self._fail(attempt, Failure(rank, "lost", f"no answer for {silence_s:.0f} s", member.node))

    def _note_hang(self, attempt: _Attempt, hung: list[int]) -> None:
        """Write down where every worker is before they are ended."""
        asked = {rank: member.call("stacks") for rank, member in enumerate(attempt.members)}
        wait(asked.values(), timeout=_ANSWER_S)
        stacks = {
            str(rank): future.result() if future.done() and future.exception() is None else "its agent did not answer"
            for rank, future in asked.items()
        }
        timeout_s = self.recipe.failures.hang_timeout_s
        self._note("hang", {"ranks": hung, "timeout_s": timeout_s, "stacks": stacks})
        for rank in hung:
            self._fail(attempt, Failure(rank, "hung", f"no progress for {timeout_s:g} s", attempt.members[rank].node))

    def _end(self, attempt: _Attempt) -> None:
        """Nobody trains on: workers that are left would wait for the others."""
        lost = {rank for rank, failure in attempt.failures.items() if failure.kind == "lost"}
        killing = [member.call("kill") for rank, member in enumerate(attempt.members) if rank not in lost]
        wait(killing, timeout=_START_S)
        for rank in lost:
            self.crew.drop(attempt.members[rank])

    def _recover(self, attempt: _Attempt) -> None:
        """Decide what follows from a failure: raise it, or go on."""
        failure = policy.root_cause(list(attempt.failures.values()))
        self.in_a_row = policy.restarts_in_a_row(self.in_a_row, self.saved_step, self.saved_step_then)
        self.saved_step_then = self.saved_step
        fields = {"rank": failure.rank, "node": failure.node, "kind": failure.kind, "message": failure.message}
        self._note("failure", fields | {"type": failure.type})
        if not policy.is_retried(failure):
            self._give_up(failure, failure.message)
        if not policy.may_restart(self.in_a_row, self.recipe.failures.max_restarts):
            message = f"{failure.message} (worker {failure.rank} on {failure.node})"
            if self.in_a_row:
                message += f"; given up after {self.in_a_row} restarts in a row without a new checkpoint"
            self._give_up(failure, message + "; failures.max_restarts says how many are borne")
        if self.how.stop() is not None and self.saved_step is None:
            raise KeyboardInterrupt
        self.in_a_row += 1
        self.restarts += 1
        self._note("restart", {"restarts": self.restarts, "from_step": self.saved_step})

    def _give_up(self, failure: Failure, message: str) -> None:
        """Raise what the user is to be told, after writing it down."""
        message = self.prepared.loaded.hide(message)
        if self.starts and (self.run_dir / "recipe.yaml").is_file():
            self._note("failed", {"error": failure.type or failure.kind, "message": message})
            with contextlib.suppress(OSError):
                RunFolder(self.run_dir).write_summary(self._failed_summary(message))
        if failure.kind == "user" and not (self.run_dir / "recipe.yaml").is_file():
            raise UserError(message)
        if failure.kind == "exception":
            raise WorkerError(failure.rank, failure.node, failure.type, message, failure.traceback)
        raise RunError(message)

    def _failed_summary(self, message: str) -> dict[str, Any]:
        run = read_run(self.run_dir)
        return {
            "run": self.run_dir.name,
            "run_dir": str(self.run_dir),
            "status": "failed",
            "step": run.step,
            "metrics": run.metrics,
            "weights_sha256": None,
            "restarts": self.restarts,
            "world_size": self.was_size,
            "time_to_first_step_s": self.first_step_s,
            "error": message,
        }

    def _leave_leaving(self, attempt: _Attempt) -> None:
        leaving = self.crew.leaving()
        for member in attempt.members:
            if member.node in leaving:
                self.crew.drop(member)

    def _note(self, name: str, fields: dict[str, Any]) -> None:
        """To the console, and to the run's events where there is a run."""
        self.how.console.event(name, fields)
        events = self.run_dir / "events.jsonl"
        if events.is_file():
            with contextlib.suppress(OSError), events.open("a", encoding="utf-8") as file:
                append_event(file, name, fields)


def _in_words(status: int | None) -> str:
    """How a process ended."""
    import signal

    if status is None:
        return "the worker's process is gone"
    if status < 0:
        hint = "; the machine may have run out of memory" if status == -signal.SIGKILL else ""
        return f"the worker's process was killed by {signal.Signals(-status).name}{hint}"
    return f"the worker's process ended with status {status} and without a word"
