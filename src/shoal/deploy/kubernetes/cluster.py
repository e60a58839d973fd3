"""The cluster that kubectl speaks to: objects made, looked at and removed, logs followed."""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import RunError, UserError
from shoal.deploy.programs import find, run

_TIMEOUT = "--request-timeout=20s"
_COMMAND_S = 60.0
"""How long a command in a container may take."""
_NO_ANSWER = re.compile(
    r"[Tt]he connection to the server|Unable to connect|no configuration has been|\bEOF\b|connection refused"
    r"|connection reset|\btimeout:|[Tt]imeout exceeded|TLS handshake timeout|i/o timeout"
    r"|\((ServerTimeout|Timeout|ServiceUnavailable)\)"
)
"""Not a mere word, which may be in a name."""


class NoAnswerError(RunError):
    """The cluster does not answer just now."""


class NotAllowedError(RunError):
    """The user may not do this there; asking again does not help."""


@dataclass(frozen=True)
class Cluster:
    """A namespace of a cluster."""

    namespace: str
    context: str | None = None

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Make an object, which must not be there yet; as the server has it."""
        group, kind = manifest["apiVersion"], manifest["kind"].lower() + "s"
        root = "/api/v1" if group == "v1" else f"/apis/{group}"
        # As it is: the server itself looks at every field, and nothing has to be asked about it before.
        path = f"{root}/namespaces/{self.namespace}/{kind}?fieldValidation=Strict"
        words = ["create", "--raw", path, "-f", "-", _TIMEOUT]
        made: dict[str, Any] = json.loads(self._call(*words, text=json.dumps(manifest)))
        return made

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> None:
        """Lay something over an object."""
        self._call("patch", kind, name, "--type=merge", "--patch", json.dumps(change), _TIMEOUT)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """An object, or None if there is none."""
        text = self._call("get", kind, name, "-o", "json", "--ignore-not-found", _TIMEOUT)
        found: dict[str, Any] | None = json.loads(text) if text.strip() else None
        return found

    def find(self, kind: str, label: str) -> list[dict[str, Any]]:
        """Objects that have a label, the oldest first."""
        text = self._call("get", kind, "-l", label, "-o", "json", "--sort-by=.metadata.creationTimestamp", _TIMEOUT)
        found: list[dict[str, Any]] = json.loads(text)["items"]
        return found

    def delete(self, kind: str, name: str) -> None:
        """Remove an object; no fault if it is gone."""
        self._call("delete", kind, name, "--ignore-not-found", "--wait=false", _TIMEOUT)

    def execute(self, pod: str, container: str, command: Sequence[str]) -> str:
        """What a command says in a container."""
        return self._call("exec", pod, "-c", container, "--", *command)

    def log(self, pod: str, container: str, since: str | None = None) -> Iterator[tuple[str, str]]:
        """The lines of a container's log, each with the time at which it was written, as they come: from the beginning
        or a time on, until the container ends. Raises `NoAnswerError` where it has not begun, or the connection
        breaks."""
        words = [find("kubectl"), *self._where(), "logs", "--follow", "--timestamps", pod, "-c", container]
        words += ["--pod-running-timeout=2s"]  # it runs; kubectl would ask again for 20 s, whatever the answer
        words += [f"--since-time={since}"] if since is not None else []
        with (
            tempfile.TemporaryFile() as said,
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=said) as process,  # noqa: S603 - no shell
        ):
            assert process.stdout is not None
            try:
                for line in process.stdout:  # to the newline: a progress bar's carriage returns are within
                    time, _, text = line.decode(errors="replace").rstrip("\r\n").partition(" ")
                    yield time, text
            finally:
                process.terminate()
            if process.wait():
                said.seek(0)
                error = in_words(said.read().decode(errors="replace"), self.namespace)
                raise error if isinstance(error, NotAllowedError) else NoAnswerError(str(error))

    def _where(self) -> list[str]:
        return ["--namespace", self.namespace, *(["--context", self.context] if self.context else [])]

    def _call(self, *words: str, text: str | None = None) -> str:
        result = run("kubectl", [*self._where(), *words], text, timeout_s=_COMMAND_S)
        if result.returncode:
            raise in_words(result.stderr, self.namespace)
        return result.stdout


def in_words(said: str, namespace: str) -> Exception:
    """What kubectl complains about, and what to do."""
    lines = [line for line in said.strip().splitlines() if not re.match(r"^[EIW]\d{4} ", line)]
    lines = [line for line in lines if "orbidden" in line][:1] or lines
    message = (lines[-1] if lines else said.strip()).removeprefix("error: ").removeprefix("Error from server ")
    if "orbidden" in message:
        return NotAllowedError(
            f"kubectl: {message}; ask whoever runs the cluster (rbac.submitters of the chart), or its quota"
        )
    if "could not find the requested resource" in said or "doesn't have a resource type" in said:
        return UserError(
            "--kubernetes: this cluster knows no RayJobs; install the KubeRay operator, version 1.7 "
            "(docs/kubernetes.md), or choose another cluster with --context"
        )
    if re.search(r"namespaces? \"?[\w-]+\"? not found", said):
        return UserError(f"--namespace: there is no namespace {namespace!r} there; install the chart first")
    if "context" in said and "does not exist" in said:
        return UserError(f"--context: {message}; kubectl config get-contexts lists them")
    if _NO_ANSWER.search(said):
        return NoAnswerError(f"--kubernetes: kubectl reaches no cluster ({message}); see kubectl cluster-info")
    return RunError(f"kubectl: {message}")
