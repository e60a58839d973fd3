"""A policy check by checkov, which knows nothing of Shoal; every exception is named, with its reason."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kubernetes.admission import pods_of
from tests.deploy.kubernetes.rendering import CASES, manifests

ROOT = Path(__file__).parents[3]
CHECKOV = ROOT / ".venv-checkov" / "bin" / "checkov"

DCGM = "DaemonSet.shoal-dcgm.dcgm-exporter"
"""NVIDIA's exporter asks the kubelet which pod has which GPU: its socket is root's alone, on the host."""
WITH_KEYS = [
    *("shoal-head", "shoal-cpu", "shoal-redis-cleanup"),
    *("first-head", "first-cpu", "first-leader", "first-redis-cleanup"),
]
EXCEPTIONS = {
    ("Pod.ml.shoal-head-pod", "CKV_K8S_38"): "the autoscaler asks the API server for pods; its role is KubeRay's",
    ("Pod.ml.shoal-redis-cleanup-pod", "CKV_K8S_38"): "KubeRay makes it from the head's pod",
    (
        "Pod.ml.shoal-head-pod",
        "CKV_K8S_8",
    ): "of the autoscaler, which KubeRay adds without a probe",
    ("Pod.ml.shoal-head-pod", "CKV_K8S_9"): "likewise",
    ("Pod.ml.first-submitter-pod", "CKV_K8S_8"): "it submits, shows a log and ends",
    ("Pod.ml.first-submitter-pod", "CKV_K8S_9"): "likewise",
    **dict.fromkeys(
        [(f"Pod.ml.{pod}-pod", "CKV_K8S_35") for pod in WITH_KEYS],
        "S3's libraries read keys from variables; a role (EKS) needs neither",
    ),
    (DCGM, "CKV_K8S_23"): "the kubelet's socket is root's",
    (DCGM, "CKV_K8S_22"): "its engine writes beside itself",
    (DCGM, "CKV_K8S_8"): "it is ready or not; ended by a probe it would lose its counters",
    (DCGM, "CKV_K8S_29"): "what is said for the container holds for the pod's only one",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not CHECKOV.is_file():
        pytest.skip("checkov is not installed: make tools")
    folder = tmp_path_factory.mktemp("rendered")
    for case in CASES:
        # The pods of Ray too, which are in a custom resource that checkov does not look into.
        pods = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"{kind.name}-pod", "namespace": kind.namespace},
                "spec": dict(kind.spec),
            }
            for kind in pods_of(manifests(case))
            if kind.namespace == "ml"
        ]
        (folder / f"{case}.yaml").write_text(yaml.safe_dump_all([*manifests(case), *pods]))
    words = [str(CHECKOV), "--config-file", str(ROOT / ".checkov.yaml"), "-d", str(folder), "-o", "json"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_nothing_fails_but_what_is_explained(report: dict[str, Any]):
    failed = {(found["resource"], found["check_id"]) for found in report["results"]["failed_checks"]}
    unexplained = sorted(found for found in failed if found not in EXCEPTIONS)
    assert unexplained == []
    assert sorted(found for found in EXCEPTIONS if found not in failed) == []  # none outlives its reason


def test_it_has_looked_at_the_pods_of_ray(report: dict[str, Any]):
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["passed"] > 1000
    assert report["summary"]["resource_count"] > 150
