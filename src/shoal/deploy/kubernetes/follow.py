"""A RayJob followed: its log, what it waits for, and how it ends."""

import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import RunError
from shoal.deploy.kubernetes.cluster import Cluster, NoAnswerError, NotAllowedError

RAY_JOBS = "rayjobs.ray.io"
_LOOK_EVERY_S = 2.0
_LOST_S = 300.0
"""How long an API server that does not answer is asked again; the job goes on regardless."""
_REST_S = 60.0
"""How long the rest of a log is asked for whose job has ended."""
_TELL_EVERY_S = 30.0
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_SUBMITTER = "ray-job-submitter"
_HEAD = "ray-head"
_OF_RAY = re.compile(r"^[\d\s:,.-]+(INFO|SUCC|WARN\w*) (cli|sdk|dashboard_sdk)\.py:\d+ -- ")
"""Lines of the command with which KubeRay submits: before the run says something, and after it."""
_BEFORE_IT = re.compile(
    r"^(Waiting for Ray Dashboard|Job submission server address|Tailing logs until|Next steps"
    r"|Running entrypoint for job |-{10,}|  +(Query the|Request the|ray job )|Job '.*' submitted successfully"
    r"|Failed to connect to GCS|[\d\s:,.-]+(INFO|SUCC|WARN\w*) [\w.]+:\d+ -- |.* -- Runtime env is setting up\.)"
)


class NoJobError(RunError):
    """There is no such job."""


@dataclass(frozen=True)
class JobState:
    """How a RayJob stands."""

    name: str
    deployment: str
    """KubeRay's word: Initializing, Waiting, Running, Complete, Failed, Suspended, Retrying, ..."""
    job: str
    """Ray's word: PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED, or empty before it was submitted."""
    job_id: str
    cluster: str
    message: str
    failures: int
    refused: tuple[str, ...] = ()
    """Why pods of its cluster could not be made: a quota, most often."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.deployment in ("Complete", "Failed", "ValidationFailed")

    @property
    def status(self) -> str:
        """In the words of `shoal submit`: pending, running, succeeded, failed or stopped."""
        if self.is_over:
            return {"SUCCEEDED": "succeeded", "STOPPED": "stopped"}.get(self.job, "failed")
        return "running" if self.deployment == "Running" else "pending"


def state_of(name: str, ray_job: Mapping[str, Any]) -> JobState:
    """How an object says that it stands."""
    status = ray_job.get("status") or {}
    return JobState(
        name,
        deployment=status.get("jobDeploymentStatus") or "",
        job=status.get("jobStatus") or "",
        job_id=status.get("jobId") or "",
        cluster=status.get("rayClusterName") or "",
        message=status.get("message") or status.get("reason") or "",
        failures=int(status.get("failed") or 0),
        refused=tuple(
            condition.get("message", "")
            for condition in (status.get("rayClusterStatus") or {}).get("conditions") or []
            if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True"
        ),
    )


def look(cluster: Cluster, name: str) -> JobState:
    """How it stands now."""
    found = cluster.get(RAY_JOBS, name)
    if found is None:
        raise NoJobError(f"job {name!r}: there is none in the namespace {cluster.namespace}, or no longer")
    return state_of(name, found)


def run_dir_of(cluster: Cluster, name: str) -> str | None:
    """The folder of a job's run, which its command names."""
    found = cluster.get(RAY_JOBS, name) or {}
    try:
        words = shlex.split((found.get("spec") or {}).get("entrypoint") or "")
    except ValueError:  # a job that Shoal has not made
        return None
    return words[words.index("--run-dir") + 1] if "--run-dir" in words[:-1] else None


def stop(cluster: Cluster, name: str) -> str:
    """Ask the run to save and end: what was done, in words."""
    state = look(cluster, name)
    if state.is_over:
        return "has already ended"
    if state.deployment != "Running" or not state.job or not state.cluster:  # nothing runs that could save
        cluster.delete(RAY_JOBS, name)
        return "did not run just now, and is removed"
    heads = cluster.find("pods", f"ray.io/cluster={state.cluster},ray.io/node-type=head")
    if not heads:
        raise RunError(f"job {name!r}: its cluster {state.cluster} has no head just now; try again")
    command = ["ray", "job", "stop", "--no-wait", "--address", "http://127.0.0.1:8265", state.job_id]
    cluster.execute(heads[-1]["metadata"]["name"], _HEAD, command)
    return "is asked to save and end"


class Follower:
    """Follows one job through all its tries."""

    def __init__(self, cluster: Cluster, name: str, tell: Callable[[str], None]) -> None:
        self._cluster, self._name, self._tell = cluster, name, tell
        self._seen: dict[str, int] = {}
        """Lines that were shown, by try: a submitter that is started again tells all once more."""
        self._pod, self._time = "", ""
        """The pod whose log was shown last, and when its last line was written."""
        self._told = ""
        self._told_at = 0.0
        self._silent_since: float | None = None
        self._is_blind = False
        """Whether the user may see the job, but not its pods or their logs."""

    def wait(self, see: Callable[[str], None] | None = None) -> JobState:
        """How it stands when it has ended; the lines of its log go to `see` as they come."""
        over_since = None
        while True:
            try:
                state = look(self._cluster, self._name)
                is_more = self._tell_of(state, see)
                self._silent_since = None
                if state.is_over:
                    over_since = over_since or time.monotonic()
                    if not is_more:
                        return state
                    if time.monotonic() - over_since > _REST_S:
                        self._tell(f"job {self._name}: the rest of its log cannot be read")
                        return state
            except (NoJobError, NotAllowedError):
                raise
            except RunError as error:
                now = time.monotonic()
                self._silent_since = self._silent_since or now
                if now - self._silent_since > _LOST_S:
                    if over_since is not None:  # only its log is missing
                        return state
                    raise RunError(f"{error}; the job may go on: kubectl get rayjob {self._name}") from error
            time.sleep(_LOOK_EVERY_S)

    def _tell_of(self, state: JobState, see: Callable[[str], None] | None) -> bool:
        """Its log, as far as it has come, or what it waits for; whether there may be more to tell."""
        is_more = False
        if self._is_blind:
            return is_more
        try:
            # A job that KubeRay has given up may train on until its cluster is gone: its log does not end then.
            if see is not None and state.job_id and (state.deployment == "Running" or state.job in _ENDED):
                is_more = self._show(state, see)
            if not state.is_over:
                self._tell_what_it_waits_for(state)
        except NotAllowedError as error:
            self._is_blind = True
            self._tell(f"job {self._name}: neither its log nor its pods can be shown: {error}")
        return is_more

    def _show(self, state: JobState, see: Callable[[str], None]) -> bool:
        """The log of this try, for as long as the connection holds; whether there may be more of it: a connection that
        breaks may look as one that ends, so only a log that says nothing new has been read whole."""
        pods = self._cluster.find("pods", f"job-name={self._name}")
        if not pods or pods[-1].get("status", {}).get("phase") not in ("Running", "Succeeded", "Failed"):
            return False
        before = self._pod, self._time
        try:
            self._show_log_of(pods[-1]["metadata"]["name"], state, see)
        except NoAnswerError:  # it has not begun, or the connection broke
            return True
        return (self._pod, self._time) != before

    def _show_log_of(self, pod: str, state: JobState, see: Callable[[str], None]) -> None:
        is_same = pod == self._pod and bool(self._time)
        skip, number, is_begun = 0 if is_same else self._seen.get(state.job_id, 0), 0, is_same
        for at, line in self._cluster.log(pod, _SUBMITTER, since=self._time if is_same else None):
            if is_same and at <= self._time:  # the server goes by whole seconds
                continue
            self._pod, self._time = pod, at
            if _OF_RAY.match(line) or (not is_begun and _BEFORE_IT.match(line)):
                continue
            is_begun = True
            number += 1
            if number > skip:
                self._seen[state.job_id] = self._seen.get(state.job_id, 0) + 1
                see(line)

    def _tell_what_it_waits_for(self, state: JobState) -> None:
        words = what_it_waits_for(state)
        now = time.monotonic()
        if words is not None and (words != self._told or now - self._told_at > _TELL_EVERY_S):
            self._told, self._told_at = words, now
            for line in [f"job {self._name}: {words}", *self._pending(state)]:
                self._tell(line)

    def _pending(self, state: JobState) -> list[str]:
        """Why its pods have no place, or could not be made."""
        if not state.cluster:
            return []
        waiting = [
            f"  {pod['metadata']['name']}: {condition.get('message', 'has no place')}"
            for pod in self._cluster.find("pods", f"ray.io/cluster={state.cluster}")
            for condition in pod.get("status", {}).get("conditions", [])
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False"
        ]
        return [*(f"  {why}" for why in state.refused), *waiting]


def what_it_waits_for(state: JobState) -> str | None:
    """In words, or None while it runs."""
    more = f" ({state.message})" if state.message else ""
    return {
        "": f"waits for the KubeRay operator{more}",
        "New": f"waits for the KubeRay operator{more}",
        "Initializing": f"its cluster starts{more}",
        "Waiting": f"waits to be submitted{more}",
        "Suspended": "is suspended: waits for its queue",
        "Suspending": "is being suspended",
        "Retrying": f"failed and is tried again on a new cluster; so far {state.failures} failed{more}",
    }.get(state.deployment)
