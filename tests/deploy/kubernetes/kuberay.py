"""What KubeRay does with a RayJob, as far as a machine without Kubernetes can: its submitter's command, with the same
options in the same order, against a Ray that runs here; its states; its retries."""

import base64
import json
import os
import secrets
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.kubernetes.api_server import ApiServer, Log
from tests.head import Head

_MOUNT = "/etc/shoal/job"


class Operator:
    """Looks for jobs and runs them, one thread each."""

    def __init__(self, api: ApiServer, head: Head, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.head = head
        self.clusters: list[str] = []
        self._ray = str(Path(sys.executable).with_name("ray"))
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": head.token,
            "PYTHONUNBUFFERED": "1",
        }
        api.execute = self._execute
        self._is_over = threading.Event()
        self._known: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._looking = threading.Thread(target=self._look)
        self._looking.start()

    def close(self) -> None:
        self._is_over.set()
        for thread in [self._looking, *self._threads]:
            thread.join(60)

    def _look(self) -> None:
        while not self._is_over.wait(0.2):
            with self.api.lock:
                names = [name for kind, name in self.api.objects if kind == "RayJob" and name not in self._known]
            for name in names:
                self._known.add(name)
                thread = threading.Thread(target=self._carry_out, args=(name,))
                self._threads.append(thread)
                thread.start()

    def _carry_out(self, name: str) -> None:
        job = self.api.get("RayJob", name)
        assert job is not None
        while job["spec"]["suspend"]:  # until a queue lets it go
            self.api.set_status(name, jobDeploymentStatus="Suspended")
            if self._is_over.wait(0.2):
                return
        failed = 0
        while True:
            status = self._try(name, job["spec"])
            if status is None:
                return
            failed += status == "FAILED"
            again = status == "FAILED" and failed <= job["spec"]["backoffLimit"]
            deployment = "Retrying" if again else "Failed" if status == "FAILED" else "Complete"
            self.api.set_status(name, jobStatus=status, jobDeploymentStatus=deployment, failed=failed)
            if not again:
                return
            time.sleep(2.5)  # long enough to be seen

    def _try(self, name: str, spec: dict[str, Any]) -> str | None:
        """One cluster, one job on it; how that ended, or None if the object is gone."""
        cluster, job_id = f"{name}-{secrets.token_hex(3)}", f"{name}-{secrets.token_hex(3)}"
        self.clusters.append(cluster)
        fresh = {"jobDeploymentStatus": "Initializing", "rayClusterName": cluster, "jobStatus": "", "jobId": job_id}
        self.api.set_status(name, **fresh)
        labels = {"ray.io/cluster": cluster, "ray.io/node-type": "head"}
        self.api.put(pod(f"{cluster}-head", labels, "ray-head"))
        while (config := self.api.get("ConfigMap", name)) is None:  # the pods wait for what they mount
            if self._is_over.wait(0.2) or self.api.get("RayJob", name) is None:
                return None
        mount = self.folder / cluster
        mount.mkdir(parents=True)
        (mount / "recipe.yaml").write_text(config["data"]["recipe.yaml"])
        for file, content in config.get("binaryData", {}).items():
            (mount / file).write_bytes(base64.b64decode(content))
        submitter = f"{name}-{secrets.token_hex(2)}"
        self.api.put(pod(submitter, {"job-name": name}, "ray-job-submitter"))
        log = self.api.logs[submitter] = Log()
        self.api.set_status(name, jobDeploymentStatus="Running", jobStatus="PENDING")
        self._submit(spec, job_id, mount, log)
        log.end()
        return self._status(job_id)

    def _submit(self, spec: dict[str, Any], job_id: str, mount: Path, log: Log) -> None:
        """KubeRay's own line of shell (BuildJobSubmitCommand), with the folder of the mount as it is here."""
        at = f"--address {self.head.address}"
        environment = json.dumps(json.dumps(yaml.safe_load(spec["runtimeEnvYAML"])))
        ray = shlex.quote(self._ray)
        line = (
            f"if ! {ray} job status {at} {job_id} >/dev/null 2>&1 ; then {ray} job submit {at} --no-wait "
            f"--runtime-env-json {environment} --submission-id {job_id} -- {spec['entrypoint']} ; fi ; "
            f"{ray} job logs {at} --follow {job_id}"
        ).replace(_MOUNT, str(mount))
        words = ["/bin/bash", "-ce", line]
        with subprocess.Popen(
            words, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=mount
        ) as process:
            assert process.stdout is not None
            for text in process.stdout:
                log.add(text.rstrip("\n"))

    def _status(self, job_id: str) -> str:
        from ray.job_submission import JobSubmissionClient

        client = JobSubmissionClient(self.head.address, headers={"Authorization": f"Bearer {self.head.token}"})
        while True:
            status = str(client.get_job_info(job_id).status.value)
            if status in ("SUCCEEDED", "FAILED", "STOPPED"):
                return status
            time.sleep(0.2)

    def _execute(self, pod: str, command: list[str]) -> tuple[str, bool]:
        """In the head's container, whose dashboard is on its own loopback."""
        assert self.api.get("Pod", pod) is not None and command[0] == "ray"
        words = [self._ray, *(word.replace("http://127.0.0.1:8265", self.head.address) for word in command[1:])]
        result = subprocess.run(words, env=self._environment, capture_output=True, text=True, check=False)
        return result.stdout + result.stderr, result.returncode == 0


def pod(name: str, labels: dict[str, str], container: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [{"name": container, "image": "shoal"}]},
        "status": {"phase": "Running"},
    }
