"""The pods of the chart would be let in by its own quota, ranges and PodSecurity levels."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli.main import run
from tests.deploy.kubernetes.admission import (
    Pods,
    containers,
    not_restricted,
    outside_range,
    over_quota,
    pods_of,
    quantity,
    takes,
)
from tests.deploy.kubernetes.rendering import CASES, NAMESPACE, manifests, template

CLUSTERS = [case for case in CASES if case != "job"]


def _the(kind: str, case: str) -> dict[str, Any]:
    return next(found for found in manifests(case) if found["kind"] == kind)


def _job_beside(case: str) -> list[Pods]:
    """The pods of a job that is submitted to what a case has installed: its cluster is one more of the same size."""
    pods = [kind for kind in pods_of(manifests(case)) if kind.name.startswith("shoal-")]
    ray = [kind for kind in pods if any(c["name"].startswith("ray-") for c in kind.spec["containers"])]
    submitter = next(kind for kind in pods_of(manifests("job")) if kind.name.endswith("submitter"))
    return [*ray, submitter]


@pytest.mark.parametrize("case", CASES)
def test_every_container_says_what_it_takes(case: str):
    for kind in pods_of(manifests(case)):
        for container in containers(kind):
            for what in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][what].keys(), f"{kind.name}/{container['name']}"
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert all(quantity(requests[name]) <= quantity(limits[name]) for name in requests)


@pytest.mark.parametrize("case", CLUSTERS)
def test_the_quota_has_room_for_all_at_its_most_and_a_job(case: str):
    here = [kind for kind in pods_of(manifests(case)) if kind.namespace == NAMESPACE]
    quota = _the("ResourceQuota", case)
    assert over_quota(quota, [*here, *_job_beside(case)]) == []
    assert over_quota(quota, [*here, *_job_beside(case), *_job_beside(case)]) != []  # it does bound something


JOBS = {
    "small": ["digits", "--workers", "2"],
    "gpu": ["gpt2", "data.dir=/shared/owt", "--workers", "16", "--gpu"],
    "spot": ["mnist", "data.dir=/shared", "--workers", "2:8", "--gpu"],
    "eks": ["synthetic_mlp", "--workers", "4", "--set", "aws.efs.fileSystemId=fs-0123456789abcdef0"],
}
"""What the documentation submits to each preset, or something as large as the preset is for."""


@pytest.mark.parametrize("preset", JOBS)
def test_a_job_as_it_is_submitted_has_room_beside_the_cluster_at_its_most(
    preset: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["submit", *JOBS[preset], "--kubernetes", "--namespace", NAMESPACE, "--preset", preset, "--dry-run"]
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert "warning" not in err
    job = list(pods_of([found for found in yaml.safe_load_all(out) if found]))
    standing = [kind for kind in pods_of(manifests(preset)) if kind.namespace == NAMESPACE]
    assert over_quota(_the("ResourceQuota", preset), [*standing, *job]) == []
    assert all(complaint is None for kind in job for complaint in not_restricted(kind))


def test_small_pods_are_counted_with_what_kuberay_puts_before_them():
    """Its container that waits for the head takes 200m and 256Mi."""
    settings = ["storage.runs.storageClass=x", "workers.cpu.cpu=100m", "workers.cpu.memory=256Mi"]
    settings += ["workers.cpu.shm=256Mi", "workers.cpu.maxReplicas=40", "quota.jobs=0"]
    rendered = [found for found in yaml.safe_load_all(template(settings).stdout) if found]
    quota = next(found for found in rendered if found["kind"] == "ResourceQuota")
    assert over_quota(quota, list(pods_of(rendered))) == []


def test_no_container_is_larger_than_the_range():
    limit_range = _the("LimitRange", "everything")
    for kind in pods_of(manifests("everything")):
        if kind.namespace == NAMESPACE:
            assert outside_range(limit_range, kind) == []
    small = {**limit_range, "spec": {"limits": [{"max": {"cpu": "3"}}]}}
    assert any(outside_range(small, kind) for kind in pods_of(manifests("everything")))


@pytest.mark.parametrize("case", CASES)
def test_pods_are_as_their_namespace_asks(case: str):
    levels = {
        found["metadata"]["name"]: found["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for found in manifests(case)
        if found["kind"] == "Namespace"
    }
    assert set(levels.values()) <= {"restricted", "privileged"}
    for kind in pods_of(manifests(case)):
        complaints = list(not_restricted(kind))
        if kind.namespace == NAMESPACE:
            assert complaints == []
        else:  # the one exception, in a namespace of its own
            assert kind.name == "dcgm-exporter" and levels[kind.namespace] == "privileged" and complaints != []


def test_nothing_of_ray_may_write_to_its_own_image():
    for kind in pods_of(manifests("everything")):
        if kind.namespace == NAMESPACE:
            assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in containers(kind))


def test_what_refuses_does_refuse():
    pods = next(kind for kind in pods_of(manifests("gpu")) if kind.name.endswith("-gpu"))
    for change in (
        {"hostNetwork": True},
        {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]},
        {"containers": [{**pods.spec["containers"][0], "securityContext": {}}]},
    ):
        assert list(not_restricted(Pods(pods.name, pods.namespace, 1, {**pods.spec, **change})))
    assert takes(pods)["requests.nvidia.com/gpu"] == 8 and takes(pods)["requests.memory"] == 900 * 2**30


def test_a_quota_of_ones_own_is_taken():
    result = template(["storage.runs.storageClass=x", "quota.hard.pods=3"])
    assert "pods: 3" in result.stdout and "requests.cpu: 3" not in result.stdout
