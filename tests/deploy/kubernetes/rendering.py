"""The chart as Helm renders it."""

import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from shoal.deploy.build import PLACEHOLDERS
from shoal.deploy.files import shipped
from shoal.deploy.kubernetes.chart import CHART, preset_file, presets
from shoal.deploy.programs import find

CHART_FOLDER = shipped(CHART)
NAMESPACE = "ml"
NAMED = ["storage.runs.storageClass=nfs"]
"""What the chart's own values need to render."""
EVERYTHING = [
    *NAMED,
    "namespace.create=true",
    "storage.datasets.enabled=true",
    "storage.datasets.storageClass=nfs",
    "storage.s3.enabled=true",
    "storage.s3.existingSecret=s3",
    "storage.s3.region=eu-central-1",
    "gcsFaultTolerance.enabled=true",
    "monitoring.enabled=true",
    "dcgm.enabled=true",
    "mlflow.enabled=true",
    "mlflow.store=postgresql",
    "tls.enabled=true",
    "networkPolicy.https=true",
    "networkPolicy.clientNamespaces={notebooks}",
    "rbac.submitters[0].kind=Group",
    "rbac.submitters[0].name=engineers",
    "rbac.submitters[0].apiGroup=rbac.authorization.k8s.io",
    "image.pullSecrets={registry}",
    "workers.cpu.priorityClassName=high",
    "workers.cpu.nodeSelector.fast=true",
    "workers.cpu.annotations.number=1",
    "environment.NCCL_DEBUG=INFO",
    "limitRange.max.cpu=64",
    "limitRange.max.memory=512Gi",
    "workers.cpu.resources.vpc\\.amazonaws\\.com/efa=1",
]
ELSEWHERE = [
    *NAMED,
    "gcsFaultTolerance.enabled=true",
    "gcsFaultTolerance.redisAddress=redis.example.com:6400",
    "storage.s3.enabled=true",
    "storage.s3.endpoint=https://s3.example.com:9000",
    "image.repository=registry.example.com/shoal@sha256:" + "0" * 64,
]
"""What others run: Redis, a store; and an image by its digest."""
JOB = [
    *NAMED,
    "job.enabled=true",
    "job.name=first",
    "job.recipe=name: first",
    "job.entrypoint=python -m shoal.cli.main train",
    "job.queue=team",
    "job.code=UEsFBgAAAAAAAAAAAAAAAAAAAAAAAA==",
    "gcsFaultTolerance.enabled=true",
    "storage.s3.enabled=true",
    "storage.s3.existingSecret=s3",
    "workers.leader.leads=true",
    "workers.leader.minReplicas=1",
    "workers.leader.maxReplicas=1",
    "workers.leader.cpu=1",
    "workers.leader.memory=4Gi",
]


def helm(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([find("helm"), *words], capture_output=True, text=True, check=False)


def template(settings: Sequence[str] = (), files: Sequence[Path] = ()) -> "subprocess.CompletedProcess[str]":
    words = ["template", "shoal", str(CHART_FOLDER), "--namespace", NAMESPACE]
    for file in files:
        words += ["--values", str(file)]
    for setting in settings:
        words += ["--set", setting]
    return helm(*words)


@functools.cache
def text_of(case: str) -> str:
    """A case rendered: a preset, `defaults`, `everything`, `elsewhere` or `job`."""
    settings = {"defaults": NAMED, "everything": EVERYTHING, "elsewhere": ELSEWHERE, "job": JOB}.get(
        case, PLACEHOLDERS.get(case, [])
    )
    files = [preset_file(case)] if case in presets() else []
    result = template(settings, files)
    assert result.returncode == 0, result.stderr
    return result.stdout


def manifests(case: str) -> list[dict[str, Any]]:
    return [document for document in yaml.load_all(text_of(case), yaml.CSafeLoader) if document]


CASES = (*presets(), "defaults", "everything", "elsewhere", "job")
