"""The chart renders, for every preset, to what Kubernetes, KubeRay and Prometheus take."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from shoal.deploy import build
from shoal.deploy.files import shipped
from shoal.deploy.kubernetes.chart import preset_file, presets, render
from shoal.deploy.programs import find
from tests.deploy.kubernetes import crds
from tests.deploy.kubernetes.admission import containers, pods_of
from tests.deploy.kubernetes.rendering import CASES, CHART_FOLDER, EVERYTHING, NAMED, helm, manifests, template, text_of

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


def test_labels_may_be_taken_away():
    result = template([*NAMED, "monitoring.enabled=true", "monitoring.dashboardLabels.grafana_dashboard=null"])
    objects = [found for found in yaml.safe_load_all(result.stdout) if found]
    (dashboard,) = (found for found in objects if found["metadata"]["name"] == "shoal-dashboard")
    assert dashboard["metadata"]["labels"].keys() == manifests("small")[0]["metadata"]["labels"].keys()


def test_yamllint():
    files = [*CHART_FOLDER.glob("*.yaml"), *CHART_FOLDER.glob("presets/*.yaml")]
    rules = "{extends: default, rules: {line-length: {max: 140}, document-start: disable, braces: disable}}"
    result = subprocess.run(
        [Path(sys.executable).with_name("yamllint"), "-d", rules, *files], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_defaults_need_one_name_only():
    assert helm("template", "shoal", str(CHART_FOLDER), "--set", NAMED[0]).returncode == 0


def test_an_image_may_be_named_by_its_digest():
    image = f"registry.example.com/shoal@sha256:{'0' * 64}"
    found = {container["image"] for kind in pods_of(manifests("elsewhere")) for container in containers(kind)}
    assert image in found and not any(f"{image}:" in name for name in found)


def test_large_numbers_of_a_values_file_are_told_as_they_were_written():
    """To Helm they are floats, which it would write as 1e+06."""
    values = {
        "environment": {"LIMIT": 1_000_000, "SHARE": 0.5, "ON": True},
        "workers": {"cpu": {"cpu": 1.5, "maxReplicas": 1_000_000, "resources": {"a.b/c": 2_000_000}}},
        "terminationGracePeriodSeconds": 1_000_000,
        "autoscaler": {"idleTimeoutSeconds": 1_000_000},
        "networkPolicy": {"dns": {"ports": [53]}},
        "quota": {"enabled": False},
    }
    text = render("shoal", "ml", values, settings=NAMED)
    assert "e+0" not in text.partition("kind: NetworkPolicy")[2]
    cluster = next(found for found in yaml.safe_load_all(text) if found and found["kind"] == "RayCluster")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert group["maxReplicas"] == 1_000_000
    container = group["template"]["spec"]["containers"][0]
    limits = container["resources"]["limits"]
    assert (limits["cpu"], limits["a.b/c"]) == ("1.5", "2000000")
    environment = {item["name"]: item["value"] for item in container["env"]}
    assert (environment["LIMIT"], environment["SHARE"], environment["ON"]) == ("1000000", "0.5", "true")


def test_ray_waits_as_long_as_kubernetes_does_and_ends_before_it():
    for case in CASES:
        for kind in pods_of(manifests(case)):
            for container in kind.spec["containers"]:
                if not container["name"].startswith("ray-"):
                    continue
                environment = {item["name"]: item["value"] for item in container["env"]}
                if container["name"] != "ray-job-submitter":
                    drain = int(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
                    assert 0 < drain < kind.spec["terminationGracePeriodSeconds"] <= drain + 30


def test_what_is_beside_ray_stays_where_machines_stay():
    settings = [setting for setting in (*NAMED, *EVERYTHING) if not setting.startswith("tls")]
    values = {"placement": {"nodeSelector": {"kept": True}, "tolerations": [{"key": "kept", "operator": "Exists"}]}}
    job = {"job": {"enabled": True, "name": "first"}}
    pods = [
        kind
        for given in (values, values | job)
        for kind in pods_of([one for one in yaml.safe_load_all(render("shoal", "ml", given, settings=settings)) if one])
    ]
    placed = {kind.name for kind in pods if kind.spec.get("nodeSelector") == {"kept": "true"}}
    assert placed == {"shoal-redis", "shoal-mlflow", "shoal-postgresql", "first-submitter"}
    assert placed == {
        kind.name for kind in pods if {"key": "kept", "operator": "Exists"} in kind.spec.get("tolerations", [])
    }


def test_what_is_trained_outlives_the_chart():
    kept = {
        found["metadata"]["name"]
        for found in manifests("everything")
        if found["kind"] == "PersistentVolumeClaim"
        and found["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    assert kept == {"shoal-runs", "shoal-datasets", "shoal-mlflow"}


def test_pods_can_write_to_their_volumes():
    for kind in pods_of(manifests("everything")):
        if kind.namespace == "ml":
            assert kind.spec["securityContext"]["fsGroup"] == kind.spec["securityContext"]["runAsUser"] > 0


def test_prometheus_looks_at_the_pods_that_ray_runs_in_by_a_port_that_they_have():
    monitor = next(found for found in manifests("everything") if found["kind"] == "PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"] == {"ray.io/is-ray-node": "yes"}  # KubeRay's own
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for kind in pods_of(manifests("everything")):
        ports = {
            port["name"]: port["containerPort"] for one in kind.spec["containers"] for port in one.get("ports", [])
        }
        if kind.name.startswith("shoal-") and kind.spec["containers"][0]["name"].startswith("ray-"):
            assert ports[endpoint["port"]] == 8080


def test_a_head_and_who_leads_come_back_elsewhere_soon_and_jobs_may_take_their_time_to_save():
    for kind in pods_of(manifests("gpu")):
        seconds = {
            toleration["key"]: toleration["tolerationSeconds"]
            for toleration in kind.spec.get("tolerations", [])
            if toleration.get("effect") == "NoExecute"
        }
        if kind.name in ("shoal-head", "shoal-leader"):
            assert seconds == {"node.kubernetes.io/not-ready": 30, "node.kubernetes.io/unreachable": 30}
        elif kind.name == "shoal-gpu":
            assert seconds == {}
    (job,) = (found for found in manifests("job") if found["kind"] == "RayJob")
    variables = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == "600"
    submitter = job["spec"]["submitterPodTemplate"]["spec"]
    assert submitter["serviceAccountName"] == "shoal-worker" and submitter["automountServiceAccountToken"] is False
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (volume,) = (volume for volume in head["volumes"] if volume["name"] == "job")
    assert volume["configMap"] == {"name": "first", "optional": True}  # KubeRay clears Redis after it is gone


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="Redis is not installed")
def test_redis_starts_with_any_password(tmp_path: Path):
    """By the chart's own line of shell, with signs that its configuration would read otherwise."""
    password = "a\"b\\c #d'e$f"
    (tmp_path / "password").write_text(password)
    redis = next(kind for kind in pods_of(manifests("everything")) if kind.name == "shoal-redis")
    (line,) = redis.spec["containers"][0]["args"]
    for path in ("/etc/redis-password/password", "/tmp/redis.conf", "/data"):
        line = line.replace(path, str(tmp_path / Path(path).name) if path != "/data" else str(tmp_path))
    socket = tmp_path / "s"
    line += f" --port 0 --unixsocket {socket}"
    with subprocess.Popen(["sh", "-c", line], stdout=subprocess.DEVNULL) as server:
        try:
            words = ["redis-cli", "-s", str(socket), "ping"]
            deadline = time.monotonic() + 20
            while not socket.exists():
                assert time.monotonic() < deadline and server.poll() is None
                time.sleep(0.05)
            for given, answer in ((password, "PONG"), ("other", "NOAUTH")):
                environment = {**os.environ, "REDISCLI_AUTH": given}
                result = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
                assert answer in result.stdout + result.stderr
        finally:
            server.terminate()


def test_the_password_of_postgresql_may_hold_any_sign(tmp_path: Path):
    """libpq reads a line of five fields between colons, with a backslash before each that belongs to one."""
    password = "a:b\\c'd$e"
    (tmp_path / "password").write_text(password)
    mlflow = next(kind for kind in pods_of(manifests("everything")) if kind.name == "shoal-mlflow")
    (line,) = mlflow.spec["containers"][0]["args"]
    line = line.partition(" && exec ")[0]
    line = line.replace("/etc/postgresql-password/password", str(tmp_path / "password"))
    line = line.replace("/tmp/pgpass", str(tmp_path / "pgpass"))
    subprocess.run(["sh", "-c", line], check=True)
    fields = re.findall(r"((?:\\.|[^:\\])*)(?::|$)", (tmp_path / "pgpass").read_text().rstrip("\n"))
    assert re.sub(r"\\(.)", r"\1", fields[4]) == password
    assert (tmp_path / "pgpass").stat().st_mode & 0o77 == 0
