"""Several releases in one Kubernetes cluster: what there is once is made once; a namespace belongs to one of them."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kubernetes.api_server import ApiServer
from tests.deploy.kubernetes.rendering import CHART_FOLDER, EVERYTHING, NAMESPACE, helm, manifests

ONCE = {"StorageClass", "DaemonSet"}
AWS = ["aws.efs.enabled=true", "aws.efs.fileSystemId=fs-0123456789abcdef0", "aws.gp3.enabled=true"]


def plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}es" if name.endswith("s") else f"{name}s"


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    made = [*manifests("everything"), *manifests("eks")]
    server = ApiServer(kinds={(found["apiVersion"], plural(found["kind"])): found["kind"] for found in made})
    (tmp_path / "kubeconfig").write_text(server.kubeconfig())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield server
    server.close()


def rendered(release: str, namespace: str) -> "subprocess.CompletedProcess[str]":
    """With a look at what is there, as `helm install` takes."""
    words = ["template", release, str(CHART_FOLDER), "--namespace", namespace, "--dry-run=server"]
    settings = [word for setting in [*EVERYTHING, *AWS] for word in ("--set", setting)]
    return helm(*words, "--disable-openapi-validation", *settings)


def objects(result: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    assert result.returncode == 0, result.stderr
    return [found for found in yaml.safe_load_all(result.stdout) if found]


def install(api: ApiServer, release: str, namespace: str) -> None:
    owner = {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": namespace}
    for found in objects(rendered(release, namespace)):
        metadata = found["metadata"]
        metadata["annotations"] = {**metadata.get("annotations", {}), **owner}
        metadata["labels"] = {**metadata.get("labels", {}), "app.kubernetes.io/managed-by": "Helm"}
        api.put(found)


def test_what_there_is_once_is_made_by_the_first(api: ApiServer):
    first = {found["kind"] for found in objects(rendered("one", "team1"))}
    assert first >= ONCE
    install(api, "one", "team1")
    second = objects(rendered("two", "team2"))
    assert not ONCE & {found["kind"] for found in second}
    assert not [found for found in second if found["metadata"].get("namespace") == "shoal-dcgm"]
    again = {found["kind"] for found in objects(rendered("one", "team1"))}  # it is upgraded
    assert again == first


def test_a_namespace_belongs_to_one_release(api: ApiServer):
    install(api, "one", NAMESPACE)
    result = rendered("two", NAMESPACE)
    assert result.returncode == 1
    assert "two: the release one is in the namespace ml already" in result.stderr
    assert "give each a namespace of its own" in result.stderr
