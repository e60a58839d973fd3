"""A run as a RayJob: a cluster of its own, made for it and gone with it."""

import base64
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from shoal.core.errors import UserError
from shoal.core.plain_yaml import dump
from shoal.data.shards.find import is_remote
from shoal.deploy.kubernetes.chart import render, the_job
from shoal.launch.parcel import pack
from shoal.recipe.schema import Recipe

_FOLDER = "/etc/shoal/job"
_LARGEST_NAME = 47
"""KubeRay appends to it, and names of objects have an end."""
_LARGEST_CODE = 700 << 10
"""Of the zip file: it travels in a ConfigMap, which holds 1 MiB, in base64."""
_REMOTE = re.compile(r"^(s3|gs|https)://")


@dataclass(frozen=True)
class JobOptions:
    """What the user says of a job beside its recipe."""

    release: str
    namespace: str
    retries: int
    ttl_s: int
    queue: str = ""
    wait_s: float = 600
    secrets: Sequence[str] = ()
    files: Sequence[Path] = ()
    """Values of the release, or of a preset."""
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class KubernetesJob:
    """A RayJob that can be made, and the ConfigMap that it mounts."""

    name: str
    run_dir: str
    ray_job: Mapping[str, Any]
    config_map: Mapping[str, Any] = field(repr=False)

    def to_yaml(self) -> str:
        """Both, as `kubectl apply` takes them."""
        return dump(self.config_map, self.ray_job)


def job_name(wanted: str) -> str:
    """A name that KubeRay takes: small letters, digits and dashes, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    if len(name) > _LARGEST_NAME:  # its end tells it from others
        head, tail = name[: _LARGEST_NAME - 21], name[-20:]
        name = f"{head.rstrip('-')}-{tail.lstrip('-')}"
    return name.strip("-")


def entrypoint(run_dir: str, wait_s: float) -> str:
    """What the job runs. Every try is the same command: the first starts the run, the others go on with it."""
    words = ["python", "-m", "shoal.cli.main", "train", f"{_FOLDER}/recipe.yaml", "--run-dir", run_dir, "--or-resume"]
    return shlex.join([*words, "--address", "auto", "--wait", f"{wait_s:g}", "--json"])


def code_values(working_dir: str | None) -> tuple[dict[str, str], list[str]]:
    """The user's code, as the chart takes it; and what of the folder is not sent, in words."""
    if working_dir is None:
        return {}, []
    if _REMOTE.match(working_dir):
        if set(working_dir) & set('$`"\\ '):
            raise UserError(f"--working-dir: {working_dir!r} holds signs that a shell would read; rename the file")
        return {"workingDir": working_dir}, []
    folder = Path(working_dir).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"--working-dir: {working_dir} is no folder, nor the address of a zip file (s3://, gs://, https://)"
        )
    with tempfile.TemporaryDirectory(prefix="shoal-") as temporary:
        parcel = Path(temporary) / "code.zip"
        left_out = pack(parcel, None, folder)
        content = parcel.read_bytes()
    if len(content) > _LARGEST_CODE:
        raise UserError(
            f"--working-dir: {folder} is {len(content) >> 10:,} KiB when packed, and {_LARGEST_CODE >> 10} KiB travel "
            "with a job; put it into the image, or a zip file of it into a store: --working-dir s3://BUCKET/code.zip"
        )
    return {"code": base64.b64encode(content).decode()}, left_out


def make_job(
    name: str,
    recipe: str,
    run_dir: str,
    workers: Mapping[str, Any],
    code: Mapping[str, str],
    options: JobOptions,
) -> KubernetesJob:
    """The objects of a job, by the chart.

    Args:
        recipe: Its text, with its references to the environment, not their values.
        workers: The chart's `workers`.
    """
    job: dict[str, Any] = {
        "enabled": True,
        "name": name,
        "entrypoint": entrypoint(run_dir, options.wait_s),
        "recipe": recipe,
        "retries": options.retries,
        "ttlSeconds": options.ttl_s,
        "queue": options.queue,
        "environmentFrom": [{"secretRef": {"name": secret}} for secret in options.secrets],
        **code,
    }
    text = render(
        options.release, options.namespace, {"job": job, "workers": dict(workers)}, options.files, options.settings
    )
    found = the_job(text)
    return KubernetesJob(name, run_dir, found["RayJob"], found["ConfigMap"])


def data_elsewhere(recipe: Recipe, volumes: Sequence[str]) -> list[str]:
    """Data that the pods do not have on a volume that all of them share, in words."""
    folder = getattr(recipe.data, "dir", None)
    if folder is None or is_remote(folder) or any(PurePosixPath(folder).is_relative_to(volume) for volume in volumes):
        return []
    shared = " or ".join(f"{volume}/..." for volume in volumes)
    if getattr(recipe.data, "download", False):
        return [
            f"data.dir: {folder} is a folder of each pod, which downloads the data into it by HTTPS if the network "
            f"policies let it (networkPolicy.https); on a volume that all share they are once: data.dir={shared}"
        ]
    return [
        f"data.dir: {folder} is on no volume of the pods; unless the image has the data, put them on one "
        f"(storage.datasets of the chart, {shared}) and say where with data.dir"
    ]


def not_scaled(ray_job: Mapping[str, Any]) -> list[str]:
    """Groups of a job that could grow and will not, in words."""
    cluster = ray_job["spec"]["rayClusterSpec"]
    if cluster["enableInTreeAutoscaling"]:
        return []
    return [
        f"nothing scales this job's cluster (a queue, or autoscaler.enabled is false): it has {group['replicas']} pods "
        f"of {group['groupName']!r} from beginning to end, for the fewest workers; for {group['maxReplicas']} say "
        "--workers without a range"
        for group in cluster["workerGroupSpecs"]
        if group["replicas"] < group["maxReplicas"]
    ]
