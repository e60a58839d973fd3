"""A run as a Ray job: sent to a cluster's head, followed from here, and going on there when nobody follows."""

import asyncio
import contextlib
import importlib
import json
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import RunError
from shoal.core.version import VERSION
from shoal.launch.dashboard import client_of, in_words
from shoal.launch.environment import referenced_environment
from shoal.launch.parcel import RECIPE_FILE, pack
from shoal.launch.run import Prepared
from shoal.observe.runs import read_run

_LOST_S = 60.0
"""How long a head that does not answer is asked again before it is given up; the job goes on regardless."""
_LOOK_EVERY_S = 0.5
_TELL_AFTER_S = 5.0
_SAVE_S = 600
"""How long a job that is stopped may take to save. Ray would kill it after 3 s."""
_DRIVERS = "drivers"
"""What machines offer that shall lead jobs, so that these survive a head that dies and comes back. Without any, Ray
puts a job's own process on the head, where it ends with it."""


@dataclass(frozen=True)
class Job:
    """A job that can be sent."""

    job_id: str
    command: str
    run_dir: Path
    recipe: str | None
    environment: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class State:
    """How a job stands."""

    job_id: str
    status: str
    """pending, running, succeeded, failed or stopped."""
    exit_code: int | None
    message: str
    run_dir: Path | None
    """Where it trains, if it is a job of ours."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in ("succeeded", "failed", "stopped")


def make_job(prepared: Prepared, overrides: Sequence[str], job_id: str, cluster_s: float = 0.0) -> Job:
    """What to run on the cluster for a run that was checked here."""
    run_dir = prepared.run_dir.absolute()
    words = ["python", "-m", "shoal.cli.main", "train"]
    if prepared.resume:
        words += ["--resume", str(run_dir), *overrides]
    else:
        words += [RECIPE_FILE, "--run-dir", str(run_dir)]
    if cluster_s:
        words += ["--wait", f"{cluster_s:g}"]
    return Job(
        job_id=job_id,
        command=shlex.join([*words, "--address", "auto", "--json"]),
        run_dir=run_dir,
        recipe=None if prepared.resume else prepared.loaded.to_yaml(),
        environment=referenced_environment(prepared.loaded),
    )


def status_of(state: State) -> int:
    """The exit status that tells how a job ended: 0 done, 1 failed, 130 stopped."""
    if state.status == "succeeded":
        return 0
    return 130 if state.status == "stopped" or state.exit_code == 130 else 1


def summary_in(line: str) -> dict[str, Any] | None:
    """The summary that `shoal train --json` ends with, if this line is one."""
    if not line.startswith("{"):
        return None
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and {"run", "run_dir", "status"} <= found.keys():
            return found
    return None


def is_chatter(line: str) -> bool:
    """Whether a line of a job's log is Ray's own, of no use to whoever follows the training."""
    return line.startswith("Running entrypoint for job ") or line.endswith(" -- Runtime env is setting up.")


def offers_to_lead(summary: dict[str, Any]) -> bool:
    """Whether, by what the dashboard tells of the machines, one of them that is up offers to lead jobs."""
    raylets = [node.get("raylet") or {} for node in (summary.get("data") or {}).get("summary") or []]
    return any(one.get("state") == "ALIVE" and _DRIVERS in (one.get("resourcesTotal") or {}) for one in raylets)


class Jobs:
    """The jobs of a cluster."""

    def __init__(self, address: str) -> None:
        """Connects, or says what is wrong with the address."""
        self.address = address
        self._client = client_of(address)

    def page(self, job_id: str) -> str:
        """The job's page on the dashboard."""
        return f"{self.address}/#/jobs/{job_id}"

    def send(self, job: Job, working_dir: Path | None) -> list[str]:
        """Submit it; what of the user's folder was too large to go along."""
        with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
            parcel = Path(folder) / "job.zip"
            left_out = pack(parcel, job.recipe, working_dir)
            variables = job.environment | {"RAY_JOB_STOP_WAIT_TIME_S": str(_SAVE_S)}
            with in_words(self.address):
                place = {_DRIVERS: 1.0} if self._leads_elsewhere() else None
                self._client.submit_job(
                    entrypoint_resources=place,
                    submission_id=job.job_id,
                    entrypoint=job.command,
                    runtime_env={"working_dir": str(parcel), "env_vars": variables},
                    metadata={"shoal": VERSION, "run_dir": str(job.run_dir)},
                )
        return left_out

    def _leads_elsewhere(self) -> bool:
        """Whether a machine that is up offers to lead jobs."""
        answer = self._client._do_request("GET", "/nodes?view=summary")
        return answer.status_code == 200 and offers_to_lead(answer.json())

    def state(self, job_id: str) -> State:
        """How the job stands now."""
        with in_words(self.address):
            info = self._client.get_job_info(job_id)
        run_dir = (info.metadata or {}).get("run_dir")
        status = str(info.status.value).lower()
        return State(job_id, status, info.driver_exit_code, info.message or "", Path(run_dir) if run_dir else None)

    def stop(self, job_id: str) -> bool:
        """Ask it to save and end; whether it was running."""
        with in_words(self.address):
            return bool(self._client.stop_job(job_id))

    def wait(self, job_id: str, tell: Callable[[str], None]) -> State:
        """How it stands when it has ended."""
        self._wait_for_start(job_id, tell)
        return self._wait(job_id, lambda state: state.is_over)

    def follow(self, job_id: str, see: Callable[[str], None], tell: Callable[[str], None]) -> State:
        """Hand every line of its log to `see`, from the first on, as they come, until it has ended."""
        self._wait_for_start(job_id, tell)
        patience = _Patience(job_id, self.address)
        cut_off = (OSError, RuntimeError, importlib.import_module("aiohttp").ClientError)
        seen = 0
        while True:
            lines = _Lines(see, skip=seen)
            try:
                asyncio.run(self._tail(job_id, lines))
                if (state := self.state(job_id)).is_over:
                    lines.end()
                    return state
            except cut_off as error:
                patience.unanswered(error)
            if lines.seen > seen:  # the next time, go on behind what was seen
                seen = lines.seen
                patience.answered()
            time.sleep(_LOOK_EVERY_S)

    def _wait_for_start(self, job_id: str, tell: Callable[[str], None]) -> None:
        """Until Ray has started it; what it waits for is told if it takes long."""
        began = time.monotonic()
        told = ""

        def has_started(state: State) -> bool:
            nonlocal told
            if state.status == "pending" and state.message != told and time.monotonic() - began > _TELL_AFTER_S:
                told = state.message
                tell(f"job {job_id} is pending: {told}")
            return state.status != "pending"

        self._wait(job_id, has_started)

    def _wait(self, job_id: str, until: Callable[[State], bool]) -> State:
        patience = _Patience(job_id, self.address)
        while True:
            try:
                if until(state := self.state(job_id)):
                    return state
                patience.answered()
            except RunError as error:
                patience.unanswered(error)
            time.sleep(_LOOK_EVERY_S)

    async def _tail(self, job_id: str, lines: "_Lines") -> None:
        async for text in self._client.tail_job_logs(job_id):
            lines.add(text)

    def summary(self, state: State) -> dict[str, Any] | None:
        """The summary of a job that has ended: the last in its log, or in its folder if that can be seen from here."""
        with contextlib.suppress(RunError), in_words(self.address):
            for line in reversed(self._client.get_job_logs(state.job_id).splitlines()):
                if (found := summary_in(line)) is not None:
                    return found
        if state.run_dir is None or state.status == "failed":  # the folder's may be of a part before this job
            return None
        return read_run(state.run_dir).summary or None if state.run_dir.is_dir() else None


class _Lines:
    """Text that comes in pieces, as whole lines; the first `skip` characters have been seen before."""

    def __init__(self, see: Callable[[str], None], skip: int) -> None:
        self.see = see
        self.seen = 0
        """Characters up to the end of the last whole line."""
        self._skip = skip
        self._rest = ""

    def add(self, text: str) -> None:
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            self.seen += len(line) + 1
            if self.seen > self._skip:
                self.see(line)

    def end(self) -> None:
        if self._rest:
            self.see(self._rest)


class _Patience:
    """How long a head has not answered."""

    def __init__(self, job_id: str, address: str) -> None:
        self._words = f"job {job_id}: {address} has not answered for {_LOST_S:.0f} s"
        self._since: float | None = None

    def answered(self) -> None:
        self._since = None

    def unanswered(self, error: Exception) -> None:
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > _LOST_S:
            raise RunError(f"{self._words} ({error}); the job may go on") from error
