"""Many workers as one run: started together, watched, and started again from the last checkpoint when one is lost.

This runs in the launcher. It knows workers only as members of a crew, on this machine or on a Ray cluster alike, and
takes every decision by a function of `policy`.
"""

import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from shoal.core.errors import NoRoomError, UserError
from shoal.launch import policy
from shoal.launch.account import Account
from shoal.launch.attempt import Attempt
from shoal.launch.crew import Crew, Member
from shoal.launch.job import make_job, meeting_host
from shoal.launch.policy import Size
from shoal.launch.run import Launch, Prepared

_POLL_S = 2.0
"""How long a member may wait for news before it answers that there is none."""
_LOOK_EVERY_S = 0.25
_ANSWER_S = 5.0
"""A member that does not answer within so long, while others fail, is lost."""
_SILENT_S = 12.0
"""A member that does not answer within so long is lost even if nobody else complains."""
_SETTLE_S = 10.0
"""How long a run goes on before it is stopped to take in more workers."""
_START_S = 120.0
"""How long agents may take to come up, and a busy cluster to have room."""
_STOOD_S = 2.0
"""A launcher that has not looked for so long was stopped itself (Ctrl-Z, say); that is no fault of the members."""


class Gang:
    """The launcher's side of a run with many workers."""

    def __init__(self, prepared: Prepared, how: Launch, crew: Crew, size: Size, threads: int | None) -> None:
        self.prepared = prepared
        self.how = how
        self.crew = crew
        self.size = size
        self.threads = threads
        self.recipe = prepared.loaded.recipe
        self.account = Account(prepared, how)
        self.starts = 0
        self.in_a_row = 0
        self.saved_step_then: int | None = None

    def run(self) -> dict[str, Any]:
        """Train to the end, whatever happens to the workers, and return the summary."""
        try:
            while (summary := self._run_once()) is None:
                pass
            return summary
        except KeyboardInterrupt:  # while no workers run that have something to save
            return self.account.interrupted()

    def _run_once(self) -> dict[str, Any] | None:
        """Start the workers and follow them: the summary, or None to go on with others."""
        members = self._wait_for_members()
        self.how.mark("agents")
        attempt = self._start(members)
        try:
            summary = self._watch(attempt)
        finally:
            self._end(attempt)
        if summary is None:
            self._recover(attempt)
        elif summary.get("before_start"):
            if self.how.stop() is not None:
                raise KeyboardInterrupt
        elif summary.get("ended_by") not in ("preemption", "resize"):
            return summary
        elif (reason := self.how.stop()) is not None:  # the user's wish came first, or meanwhile
            return summary | {"ended_by": reason}
        self._leave_leaving(attempt)
        return None

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
            obstacle = self.crew.obstacle() if self.starts == 0 and self.how.give_up_s is None else None
            if obstacle is not None and not self.how.wait_s:
                raise UserError(
                    f"cluster.workers: {obstacle}; ask for fewer or smaller ones, or wait with --wait SECONDS"
                )
            limit_s = self._longest_wait_s(obstacle is not None)
            if waited_s > limit_s:
                raise NoRoomError(f"cluster.workers: waited {waited_s:.0f} s for {self.crew.waiting_for()}; given up")
            if waited_s - told >= 1.0 and waited_s > 2.0 and len(ready) < self.size.least:
                told = waited_s
                left_s = round(limit_s - waited_s)
                self.how.console.event("waiting", {"for": self.crew.waiting_for(), "seconds_left": left_s})
            time.sleep(0.05)

    def _longest_wait_s(self, is_more_than_there_is: bool) -> float:
        """For machines that were lost, for those that the cluster does not have yet, or for room on those it has."""
        if self.how.give_up_s is not None:
            return self.how.give_up_s
        if self.starts:
            return self.recipe.failures.machine_timeout_s
        return self.how.wait_s if is_more_than_there_is else max(self.how.wait_s, _START_S)

    def _start(self, members: list[Member]) -> Attempt:
        """Start a worker at each member; those that cannot are failures of the attempt."""
        self.how.enter("starting")
        was_size = self.account.world_size
        if was_size is not None and was_size != len(members):
            self.account.note("resize", {"from": was_size, "to": len(members)})
        self.account.world_size = len(members)
        members = sorted(members, key=lambda member: [other.node for other in members].index(member.node))
        attempt = Attempt(self.starts, members)
        self.starts += 1
        ports = self._answers(attempt, {0: members[0].call("open_port", meeting_host(attempt))})
        if attempt.failures:
            return attempt
        jobs = [make_job(self.account, attempt, rank, ports[0], self.threads) for rank in range(len(members))]
        self._answers(attempt, {rank: member.call("start", jobs[rank]) for rank, member in enumerate(members)})
        if not attempt.failures:
            for rank in range(len(members)):
                self._poll(attempt, rank)
        return attempt

    def _answers(self, attempt: Attempt, asked: Mapping[int, "Future[Any]"]) -> dict[int, Any]:
        """What members answer that are starting; one that does not is lost."""
        deadline = time.monotonic() + _START_S
        pending = set(asked.values())
        while pending and time.monotonic() < deadline:
            if self.how.stop() is not None:
                if attempt.number:  # they are about to write
                    wait([member.call("kill") for member in attempt.members], timeout=_ANSWER_S)
                raise KeyboardInterrupt  # whoever closes the crew ends what is left
            _, pending = wait(pending, timeout=0.1)
        answers = {}
        for rank, future in asked.items():
            try:
                answers[rank] = future.result(timeout=0)
            except Exception as error:  # noqa: BLE001 - an agent that is gone, in whatever way
                attempt.fail(rank, "lost", _first_line(error))
        return answers

    def _poll(self, attempt: Attempt, rank: int) -> None:
        attempt.polls[attempt.members[rank].call("poll", attempt.number, _POLL_S)] = rank
        attempt.asked[rank] = time.monotonic()

    def _watch(self, attempt: Attempt) -> dict[str, Any] | None:
        """Follow the workers to their end: rank 0's summary, or None if they failed."""
        while not attempt.failures and not attempt.is_over:
            self._take_answers(attempt)
            self._look_after(attempt)
        failed = time.monotonic()
        while attempt.polls and not attempt.is_over and time.monotonic() - failed < attempt.patience_s:
            self._take_answers(attempt)
            self._find_lost(attempt, _ANSWER_S - 2.0)
        # Rank 0 ends when all is saved and written down: whoever dies after that has nothing left to lose.
        return attempt.ended.get(0)

    def _take_answers(self, attempt: Attempt) -> None:
        done, _ = wait(attempt.polls, timeout=_LOOK_EVERY_S, return_when=FIRST_COMPLETED)
        for future in done:
            rank = attempt.polls.pop(future)
            try:
                answer = future.result()
            except Exception as error:  # noqa: BLE001 - an agent that is gone, in whatever way
                attempt.fail(rank, "lost", _first_line(error))
                continue
            attempt.still_s[rank] = answer["still_s"]
            attempt.starting_s[rank] = answer["starting_s"]
            for message in answer["messages"]:
                if message["what"] == "tick" and not attempt.has_stepped:
                    attempt.has_stepped = True
                    self.how.enter("training")
                if not attempt.take(rank, message):
                    self.account.see(rank, message)
            if rank not in attempt.ended and rank not in attempt.failures:
                self._poll(attempt, rank)

    def _look_after(self, attempt: Attempt) -> None:
        """Everything that may happen to workers that run."""
        self._find_lost(attempt, _SILENT_S)
        if attempt.failures:
            return
        if self.how.stop() is not None and not attempt.has_stepped and 0 not in attempt.ended:
            raise KeyboardInterrupt  # they may take minutes more to get ready
        timeout_s = self.recipe.failures.hang_timeout_s
        if hung := policy.hung_ranks(attempt.standing(), timeout_s):
            self._note_hang(attempt, hung, timeout_s)
        elif not attempt.is_slow_start_told and (slow := policy.hung_ranks(attempt.starting_s, timeout_s)):
            # A long download, perhaps, so nobody is ended: if others wait for one that hangs, PyTorch's limit ends it.
            attempt.is_slow_start_told = True
            self.account.note("slow_start", {"ranks": slow, "timeout_s": timeout_s, "stacks": _stacks(attempt)})
        elif attempt.stop_sent is None and (reason := self._reason_to_stop(attempt)) is not None:
            attempt.stop_sent = reason
            for member in attempt.members:
                member.call("stop", attempt.number, reason)

    def _reason_to_stop(self, attempt: Attempt) -> str | None:
        if (signal_name := self.how.stop()) is not None:
            return signal_name
        leaving = self.crew.leaving() & {member.node for member in attempt.members}
        if leaving:
            self.account.note("preemption", {"nodes": sorted(leaving)})
            return "preemption"
        since_start_s = time.monotonic() - attempt.started
        ready = len(self.crew.members()) if self.size.is_elastic else len(attempt.members)
        more = policy.size_to_grow_to(len(attempt.members), ready, self.size, since_start_s, _SETTLE_S)
        return None if more is None else "resize"

    def _find_lost(self, attempt: Attempt, silent_s: float) -> None:
        now = time.monotonic()
        stood_s, attempt.looked = now - attempt.looked, now
        for rank in set(attempt.polls.values()):
            if stood_s > _STOOD_S:
                attempt.asked[rank] += stood_s
            silence_s = now - attempt.asked[rank]
            if silence_s > _POLL_S + silent_s:
                attempt.fail(rank, "lost", f"no answer for {silence_s:.0f} s")

    def _note_hang(self, attempt: Attempt, hung: list[int], timeout_s: float) -> None:
        """Write down where every worker is before they are ended."""
        stacks = _stacks(attempt)
        self.account.note("hang", {"ranks": hung, "timeout_s": timeout_s, "stacks": stacks})
        # All of them wait where one does; one whose process is stopped is why.
        stopped = [int(rank) for rank, text in stacks.items() if "is stopped" in text.partition("\n")[0]]
        for rank in stopped or hung:
            why = f": {stacks[str(rank)]}" if rank in stopped else ""
            attempt.fail(rank, "hung", f"no progress for {timeout_s:g} s{why}")

    def _end(self, attempt: Attempt) -> None:
        """Nobody trains on: workers that are left would wait for the others."""
        lost = {rank for rank, failure in attempt.failures.items() if failure.kind == "lost"}
        killing = {rank: member.call("kill") for rank, member in enumerate(attempt.members) if rank not in lost}
        wait(killing.values(), timeout=_SILENT_S)
        # One that does not even answer to that is on a machine that goes, or is cut off, just now.
        for rank in lost | {rank for rank, killed in killing.items() if not killed.done()}:
            self.crew.drop(attempt.members[rank])

    def _recover(self, attempt: Attempt) -> None:
        """Decide what follows from a failure: raise it, or go on."""
        account = self.account
        failure = policy.root_cause(list(attempt.failures.values()))
        if failure.kind == "user" and self.starts == 1:  # before anything of this start was written
            raise UserError(failure.message)
        self.in_a_row = policy.restarts_in_a_row(self.in_a_row, account.saved_step, self.saved_step_then)
        self.saved_step_then = account.saved_step
        account.note_failure(failure)
        if not policy.is_retried(failure):
            account.give_up(failure, failure.message)
        if self.how.stop() is not None:
            raise KeyboardInterrupt
        if not policy.may_restart(self.in_a_row, self.recipe.failures.max_restarts):
            message = f"{failure.message} (worker {failure.rank} on {failure.node})"
            if self.in_a_row:
                message += f"; given up after {self.in_a_row} restarts in a row without a new checkpoint"
            account.give_up(failure, message + "; failures.max_restarts says how many are borne")
        self.in_a_row += 1
        account.restarts += 1
        account.note("restart", {"restarts": account.restarts, "from_step": account.saved_step})

    def _leave_leaving(self, attempt: Attempt) -> None:
        leaving = self.crew.leaving()
        for member in attempt.members:
            if member.node in leaving:
                self.crew.drop(member)


def _stacks(attempt: Attempt) -> dict[str, str]:
    """Where every worker is now, by rank."""
    asked = [member.call("stacks") for member in attempt.members]
    wait(asked, timeout=_ANSWER_S)
    return {
        str(rank): future.result() if future.done() and future.exception() is None else "its agent did not answer"
        for rank, future in enumerate(asked)
    }


def _first_line(error: Exception) -> str:
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
