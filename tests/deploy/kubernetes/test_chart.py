"""The chart renders, for every preset, to what Kubernetes, KubeRay and Prometheus take."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from shoal.deploy import build
from shoal.deploy.files import shipped
from shoal.deploy.kubernetes.chart import preset_file, presets
from shoal.deploy.programs import find
from tests.deploy.kubernetes import crds
from tests.deploy.kubernetes.rendering import CASES, CHART_FOLDER, NAMED, helm, manifests, text_of

SHARED_CRDS = Path(__file__).parents[4] / "shared" / "crds"
VERSIONS = ("1.33", "1.34", "1.35", "1.36")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_that_kubernetes_knows(case: str, version: str):
    for manifest in manifests(case):
        where = f"{manifest['kind']} {manifest['metadata']['name']}"
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:  # a custom resource, or a mistake: which the CRDs tell
            assert list(crds.complaints(manifest)) == [], where
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{where}: {error}")


def test_the_validators_refuse_what_is_wrong():
    cluster = next(manifest for manifest in manifests("gpu") if manifest["kind"] == "RayCluster")
    wrong = json.loads(json.dumps(cluster))
    wrong["spec"]["workerGroupSpecs"][0]["maxReplica"] = 3
    wrong["spec"]["autoscalerOptions"]["version"] = "v3"
    wrong["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"] *= 2
    del wrong["spec"]["workerGroupSpecs"][0]["template"]
    assert len(list(crds.complaints(wrong))) > 3
    assert any("is there twice" in complaint for complaint in crds.complaints(wrong))
    with pytest.raises(KeyError):
        list(crds.complaints({"apiVersion": "ray.io/v1", "kind": "RayClutser"}))
    with pytest.raises(kubernetes_validate.ValidationError):
        policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "x"}}
        kubernetes_validate.validate({**policy, "spec": {"podSelectors": {}}}, "1.36", strict=True)


@pytest.mark.skipif(not SHARED_CRDS.is_dir(), reason="the CustomResourceDefinitions themselves are not here")
def test_the_schemas_are_those_of_the_definitions():
    assert crds.schemas() == crds.schemas_in(SHARED_CRDS)


@pytest.mark.skipif(not SHARED_CRDS.is_dir(), reason="the CustomResourceDefinitions themselves are not here")
@pytest.mark.parametrize("case", CASES)
def test_another_validator_agrees(case: str, tmp_path: Path):
    file = tmp_path / "rendered.yaml"
    file.write_text(text_of(case))
    words = [str(SHARED_CRDS / "validate"), "--strict", str(SHARED_CRDS), "--", str(file)]
    result = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0 and "errors 0" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("name", presets())
def test_helm_finds_nothing_to_complain_about(name: str):
    settings = [word for setting in build.PLACEHOLDERS.get(name, []) for word in ("--set", setting)]
    result = helm("lint", "--strict", str(CHART_FOLDER), "--values", str(preset_file(name)), *settings)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("case", CASES)
def test_kubectl_reads_every_object(case: str):
    """Also those of kinds that it does not know: without a server it does not look them up."""
    result = subprocess.run(
        [find("kubectl"), "annotate", "--local", "-f", "-", "shoal/seen=yes", "-o", "name"],
        input=text_of(case),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == len(manifests(case))


def test_names_and_namespaces():
    for case in CASES:
        seen = set()
        for manifest in manifests(case):
            key = (manifest["kind"], manifest["metadata"].get("namespace"), manifest["metadata"]["name"])
            assert key not in seen, f"{case}: {key} twice"
            seen.add(key)
            if manifest["kind"] not in ("Namespace", "StorageClass"):
                assert manifest["metadata"]["namespace"] in ("ml", "shoal-dcgm"), key


def test_what_kuberay_would_refuse():
    """Its own rules, which its definitions do not hold."""
    for case in CASES:
        for manifest in manifests(case):
            if manifest["kind"] not in ("RayCluster", "RayJob"):
                continue
            spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
            assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 52, 0)  # for its token
            assert spec["authOptions"]["mode"] == "token"
            head = spec["headGroupSpec"]
            assert head["rayStartParams"]["num-cpus"] == "0"
            assert "restartPolicy" not in head["template"]["spec"]  # autoscaler v2 wants Never, or none
            if spec["enableInTreeAutoscaling"]:
                assert spec["autoscalerOptions"]["version"] == "v2"
            if manifest["kind"] == "RayJob":
                assert manifest["spec"]["shutdownAfterJobFinishes"] or not manifest["spec"]["suspend"]
                assert not spec["enableInTreeAutoscaling"] or not manifest["spec"]["suspend"]  # Kueue takes no such
            for group in spec["workerGroupSpecs"]:
                assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_alerts_and_the_dashboard_are_those_that_ship(tmp_path: Path):
    objects = {(found["kind"], found["metadata"]["name"]): found for found in manifests("gpu")}
    rules = objects["PrometheusRule", "shoal"]["spec"]
    assert rules == yaml.safe_load((shipped("helm/shoal/files/alerts.yml")).read_text())
    dashboard = json.loads(objects["ConfigMap", "shoal-dashboard"]["data"]["shoal.json"])
    assert dashboard["panels"]
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rules))
    assert subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, check=False).returncode == 0


def test_what_is_made_from_the_chart_is_up_to_date():
    for name, text in build.chart_files().items():
        assert (CHART_FOLDER / "files" / name).read_text() == text, "make charts"
    there = {file.name: file.read_text() for file in shipped("kubernetes").glob("*.yaml")}
    assert there == build.manifests(), "make charts"


def test_yamllint():
    files = [*CHART_FOLDER.glob("*.yaml"), *CHART_FOLDER.glob("presets/*.yaml")]
    rules = "{extends: default, rules: {line-length: {max: 140}, document-start: disable, braces: disable}}"
    result = subprocess.run(
        [Path(sys.executable).with_name("yamllint"), "-d", rules, *files], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_defaults_need_one_name_only():
    assert helm("template", "shoal", str(CHART_FOLDER), "--set", NAMED[0]).returncode == 0
