"""`shoal submit --kubernetes`: real kubectl and Helm, an API server that keeps what is valid, and jobs that run."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli.main import run
from shoal.deploy.kubernetes.cluster import Cluster
from shoal.deploy.kubernetes.follow import Follower, look
from shoal.observe.runs import read_run
from tests.deploy.kubernetes.api_server import ApiServer, Log
from tests.deploy.kubernetes.kuberay import Operator, pod
from tests.deploy.kubernetes.rendering import NAMED, template, text_of
from tests.head import Head, head_node

Capture = pytest.CaptureFixture[str]
SMALL = ["cluster.threads_per_worker=1", "cluster.gpus_per_worker=0"]
TASK = """
import os, pathlib, time, torch

class Slow:
    def __init__(self, pause_s=0.0, once=None):
        self.pause_s, self.once, self.step = pause_s, once, 0

    def model(self):
        return torch.nn.Linear(4, 1)

    def datasets(self):
        torch.manual_seed(1)
        train = [(torch.randn(4), torch.randn(1)) for _ in range(64)]
        return {"train": train, "val": train[:8]}

    def loss(self, model, batch):
        self.step += model.training
        time.sleep(self.pause_s)
        if self.once and self.step == 13 and not pathlib.Path(self.once).exists():
            pathlib.Path(self.once).touch()
            raise ArithmeticError("made to fail once")
        return (model(batch[0]) - batch[1]).pow(2).mean()
"""
RECIPE = {
    "name": "slow",
    "task": {"name": "slow_task:Slow"},
    "train": {"steps": 24, "global_batch": 8},
    "checkpoint": {"every_steps": 5},
    "observe": {"every_steps": 1},
    "cluster": {"threads_per_worker": 1, "gpus_per_worker": 0},
}


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with head_node() as found:
        yield found


@pytest.fixture
def api(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """An API server that kubectl speaks to; nobody carries its jobs out."""
    server = ApiServer()
    (here / "kubeconfig").write_text(server.kubeconfig())
    monkeypatch.setenv("KUBECONFIG", str(here / "kubeconfig"))
    yield server
    server.close()


@pytest.fixture
def operator(api: ApiServer, head: Head, tmp_path: Path) -> Iterator[Operator]:
    found = Operator(api, head, tmp_path / "mounts")
    yield found
    found.close()


def slow(**arguments: Any) -> dict[str, Any]:
    return {**RECIPE, "task": {"name": "slow_task:Slow", "args": arguments}}


def at(run_dir: Path) -> list[str]:
    """The run's folder on the storage, which is here where it is in the pods."""
    return ["--run-dir", str(run_dir), "--set", f"storage.runs.mountPath={run_dir.parent}"]


def submit(*words: str) -> int:
    return run(["submit", *words, "--kubernetes"])


def ray_job(name: str, **status: str) -> dict[str, Any]:
    spec = {"entrypoint": "python -m shoal.cli.main train x --run-dir /shared/runs/first --or-resume"}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": spec, "status": status}


def the_job(api: ApiServer) -> dict[str, Any]:
    (job,) = (found for (kind, _), found in api.objects.items() if kind == "RayJob")
    return job


def last_json(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


# ---------------------------------------------------------------- to the end


def test_a_job_is_followed_to_its_end(operator: Operator, tmp_path: Path, capfd: Capture) -> None:
    words = ["digits", "train.epochs=2", *SMALL, "--workers", "2", "--preset", "small", "--name", "Trial_1"]
    run_dir = tmp_path / "shared" / "first"
    assert submit(*words, *at(run_dir), "--json") == 0
    out, err = capfd.readouterr()
    record = last_json(out)
    assert record["job_id"].startswith("trial-1-20") and record["status"] == "succeeded"
    assert record["summary"]["status"] == "done" and record["summary"]["world_size"] == 2
    assert read_run(run_dir).summary["weights_sha256"] == record["summary"]["weights_sha256"]
    assert f"job {record['job_id']} is made in the namespace shoal" in err
    assert "13,754 parameters on 2 workers" in err and "step 46/46" in err
    for chatter in ("INFO", "submitted successfully", "Tailing", "weights_sha256", "Traceback"):
        assert chatter not in err
    config = operator.api.get("ConfigMap", record["job_id"])
    job = the_job(operator.api)
    assert config is not None and config["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]


@pytest.mark.slow
def test_a_try_that_fails_is_followed_by_another_that_goes_on(
    operator: Operator, here: Path, tmp_path: Path, capfd: Capture
) -> None:
    (here / "slow_task.py").write_text(TASK)
    run_dir, once = tmp_path / "shared" / "run", tmp_path / "once"
    (here / "slow.yaml").write_text(json.dumps(slow(once=str(once))))
    words = ["slow.yaml", "--working-dir", ".", "--preset", "small", *at(run_dir), "--retries", "2"]
    assert submit(*words) == 0
    out, err = capfd.readouterr()
    assert len(operator.clusters) == 2 and once.exists()
    assert "made to fail once" in out + err and "tried again on a new cluster; so far 1 failed" in err
    found = read_run(run_dir)
    assert found.summary["status"] == "done" and found.summary["step"] == 24
    assert found.summary["resumed_from_step"] == 10  # what was saved was not trained again
    assert out.count("step 24/24  epoch 3.00  train_loss") == 1


@pytest.mark.slow
def test_a_job_is_stopped_with_a_checkpoint_and_goes_on(
    operator: Operator, here: Path, tmp_path: Path, capfd: Capture
) -> None:
    (here / "slow_task.py").write_text(TASK)
    (here / "slow.yaml").write_text(
        json.dumps({**RECIPE, "task": {"name": "slow_task:Slow", "args": {"pause_s": 0.2}}})
    )
    run_dir = tmp_path / "shared" / "run"
    words = ["slow.yaml", "--working-dir", ".", "--preset", "small", *at(run_dir)]
    assert submit(*words, "--no-follow", "--json") == 0
    out, err = capfd.readouterr()
    name = last_json(out)["job_id"]
    assert last_json(out)["status"] in ("pending", "running") and f"shoal submit --kubernetes --stop {name}" in err
    deadline = time.monotonic() + 90
    while not run_dir.is_dir() or read_run(run_dir).step < 3:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert submit("--stop", name) == 0
    assert f"job {name}: stopped" in (err := capfd.readouterr().err) and f"--run-dir {run_dir}" in err
    assert read_run(run_dir).summary["status"] == "interrupted"
    assert submit(*words) == 0
    assert read_run(run_dir).summary["status"] == "done" and read_run(run_dir).summary["resumed_from_step"] >= 3


@pytest.mark.slow
def test_ctrl_c_ends_the_following_and_not_the_job(
    operator: Operator, here: Path, tmp_path: Path, capfd: Capture
) -> None:
    (here / "slow_task.py").write_text(TASK)
    (here / "slow.yaml").write_text(
        json.dumps({**RECIPE, "task": {"name": "slow_task:Slow", "args": {"pause_s": 0.3}}})
    )
    run_dir = tmp_path / "shared" / "run"
    words = ["slow.yaml", "--working-dir", ".", "--preset", "small", *at(run_dir), "--kubernetes"]
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.cli.main", "submit", *words],
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "step 3/24" in line or "3/24" in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "goes on there" in err
    name = the_job(operator.api)["metadata"]["name"]
    assert submit("--follow", name) == 0
    out, _ = capfd.readouterr()
    assert "24/24" in out and read_run(run_dir).summary["restarts"] == 0


def test_a_connection_that_breaks_loses_no_line_and_repeats_none(api: ApiServer, capfd: Capture) -> None:
    log = api.logs["first-x"] = Log()
    log.breaks_at = 3
    own = ["----------", "2026-01-01 10:00:00 WARNING my_task.py:12 -- loss is high", "Next steps: tune lr"]
    lines = ["Job 'a' submitted successfully", "step 1", *own, *(f"step {number}" for number in range(2, 40))]
    for line in lines:
        log.add(line)
    log.end()
    api.put(ray_job("first", jobDeploymentStatus="Complete", jobStatus="SUCCEEDED", jobId="a"))
    api.put(pod("first-x", {"job-name": "first"}, "ray-job-submitter"))
    states = iter([{"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}] * 2)
    cluster = Cluster("shoal")

    def seen() -> list[str]:
        found: list[str] = []
        follower = Follower(cluster, "first", lambda line: None)
        for state in states:
            api.set_status("first", **state)
            follower._show(look(cluster, "first"), found.append)
        return found

    assert seen() == lines[1:]


def test_an_api_server_that_is_away_for_a_while_is_waited_for(
    api: ApiServer, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.put(ray_job("first", jobDeploymentStatus="Running", jobStatus="RUNNING", jobId="a"))
    (here / "away").write_text(ApiServerAddress)
    there = str(here / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(here / "away"))

    def come_back() -> None:
        time.sleep(3)
        api.set_status("first", jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
        os.environ["KUBECONFIG"] = there

    thread = threading.Thread(target=come_back)
    thread.start()
    assert Follower(Cluster("shoal"), "first", lambda line: None).wait().status == "succeeded"
    thread.join()


@pytest.mark.parametrize("hidden", ["pods", "pods/log"])
def test_who_may_not_see_the_log_is_told_once_and_waits_for_the_end(
    api: ApiServer, here: Path, capfd: Capture, hidden: str
) -> None:
    api.put(ray_job("first", jobDeploymentStatus="Running", jobStatus="RUNNING", jobId="a", rayClusterName="c"))
    api.put(pod("first-x", {"job-name": "first"}, "ray-job-submitter"))
    api.logs["first-x"] = Log()
    api.hides = lambda resource: f'{resource} is forbidden: User "me" cannot' if resource == hidden else None

    def end() -> None:
        time.sleep(5)
        api.set_status("first", jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")

    thread = threading.Thread(target=end)
    thread.start()
    assert submit("--follow", "first") == 0
    thread.join()
    _, err = capfd.readouterr()
    assert err.count("neither its log nor its pods can be shown") == 1 and "is forbidden" in err
    assert "job first: succeeded" in err


def test_who_may_not_see_the_job_is_told(api: ApiServer, here: Path, capsys: Capture) -> None:
    api.put(ray_job("first", jobDeploymentStatus="Running", jobStatus="RUNNING"))
    api.hides = lambda resource: 'rayjobs.ray.io "first" is forbidden: User "me" cannot get'
    assert submit("--follow", "first") == 1
    assert "ask whoever runs the cluster (rbac.submitters of the chart)" in capsys.readouterr().err


def test_a_job_that_shoal_has_not_made_may_have_any_command(api: ApiServer, here: Path, capsys: Capture) -> None:
    job = ray_job("first", jobDeploymentStatus="Complete", jobStatus="SUCCEEDED", jobId="a")
    job["spec"]["entrypoint"] = "python -c 'print(1)"
    api.put(job)
    assert submit("--follow", "first", "--json") == 0
    assert last_json(capsys.readouterr().out)["run_dir"] is None


def test_a_quota_that_refuses_pods_is_told(api: ApiServer, here: Path) -> None:
    refused = {"type": "ReplicaFailure", "status": "True", "message": 'pods "x" is forbidden: exceeded quota: shoal'}
    waits = ray_job("first", jobDeploymentStatus="Initializing", rayClusterName="c")
    waits["status"]["rayClusterStatus"] = {"conditions": [refused]}
    api.put(waits)
    told: list[str] = []
    follower = Follower(Cluster("shoal"), "first", told.append)
    follower._tell_what_it_waits_for(look(Cluster("shoal"), "first"))
    assert told == ["job first: its cluster starts", '  pods "x" is forbidden: exceeded quota: shoal']


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"jobDeploymentStatus": "Initializing", "rayClusterName": "c"}, "did not run just now, and is removed"),
        ({"jobDeploymentStatus": "Running", "rayClusterName": "c"}, "did not run just now, and is removed"),
        ({"jobDeploymentStatus": "Retrying", "jobStatus": ""}, "did not run just now, and is removed"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "has already ended"),
    ],
)
def test_what_stopping_does_where_nothing_runs(api: ApiServer, capsys: Capture, status: Any, words: str) -> None:
    api.put(ray_job("first", **status))
    assert submit("--stop", "first") == 0
    assert f"job first {words}" in capsys.readouterr().err
    assert (api.get("RayJob", "first") is None) == ("removed" in words)


def test_the_installed_values_are_those_of_the_chart(api: ApiServer, here: Path, capsys: Capture) -> None:
    values = text_of("everything")
    (config,) = (found for found in yaml.safe_load_all(values) if found and found["metadata"]["name"] == "shoal-values")
    api.put(config)
    found = made(capsys, "digits", "--workers", "4")
    (group,) = found["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["template"]["spec"]["nodeSelector"] == {"fast": "true"} and group["maxReplicas"] == 4
    assert submit("digits", "--release", "other", "--dry-run") == 2
    assert "the chart is not installed as 'other'" in capsys.readouterr().err


def test_a_group_that_was_taken_out_of_the_chart_is_not_put_back(api: ApiServer, here: Path, capsys: Capture) -> None:
    """The preset has no group called cpu, which is what the chart has where nobody says so."""
    (config,) = (
        found for found in yaml.safe_load_all(text_of("gpu")) if found and found["metadata"]["name"] == "shoal-values"
    )
    api.put(config)
    groups = {"leader": (1, 1), "gpu": (2, 2)}
    found = made(capsys, "mnist", "--workers", "16", "--gpu")["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert {group["groupName"]: (group["minReplicas"], group["maxReplicas"]) for group in found} == groups
    assert {group["template"]["spec"]["containers"][0]["image"] for group in found} == {"shoal:0.1.0"}


# ---------------------------------------------------------------- what is made


def made(capsys: Capture, *words: str) -> dict[str, Any]:
    assert submit(*words, "--dry-run") == 0
    return {found["kind"]: found for found in yaml.safe_load_all(capsys.readouterr().out)}


def test_a_job_has_the_machines_that_its_recipe_wants(here: Path, capsys: Capture) -> None:
    found = made(capsys, "mnist", "--workers", "3:6", "--gpu", "--preset", "spot", "--gpus-per-machine", "2")
    leader, group = found["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert leader["resources"] == {"CPU": "0", "drivers": "1000"}  # it leads the job, and does not train
    assert found["RayJob"]["spec"]["entrypointResources"] == '{"drivers": 1}'
    assert (group["groupName"], group["minReplicas"], group["maxReplicas"]) == ("spot", 2, 3)
    container = group["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert group["template"]["spec"]["nodeSelector"] == {"karpenter.sh/capacity-type": "spot"}  # the preset's own
    assert found["RayJob"]["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] is True


OWN_DATA = {"task": {"name": "far_task:Far"}, "train": {"steps": 4, "global_batch": 8}, "name": "far"}


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["imagenet", "data.dir=/not-here"], "no folder 'train' in /not-here"),
        (["agnews", "data.dir=/not-here"], "train.csv not found in /not-here"),
        (["far.yaml"], "data: [Errno 2] No such file or directory: '/not-here/far.pt'"),
    ],
)
def test_data_may_be_on_the_cluster_alone(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: list[str], missing: str
) -> None:
    (here / "far_task.py").write_text(
        TASK.replace("Slow", "Far").replace("torch.manual_seed(1)", "torch.load('/not-here/far.pt', weights_only=True)")
    )
    (here / "far.yaml").write_text(yaml.safe_dump(OWN_DATA))
    fetched: list[str] = []
    monkeypatch.setattr("urllib.request.urlopen", lambda url, **_: fetched.append(url))
    words = [*words, "--workers", "2", "--preset", "small", "--dry-run"]
    assert submit(*words) == 0
    out, err = capsys.readouterr()
    job = next(found for found in yaml.safe_load_all(out) if found["kind"] == "RayJob")
    group = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][-1]
    assert (group["groupName"], group["maxReplicas"]) == ("cpu", 2)
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "4Gi"  # the preset's own
    assert missing in err and "pods have as much as those of the group 'cpu'" in err
    assert submit(*words, "--gpu") == 2  # nothing to go by
    err = capsys.readouterr().err
    assert missing in err and "no group of machines with GPUs to go by; say one with --preset" in err
    assert fetched == []


def test_data_that_are_here_and_do_not_fit_the_recipe_are_refused(here: Path, capsys: Capture) -> None:
    rows = "".join(f'"{number % 4 + 1}","a title","some words"\n' for number in range(40))
    for name in ("train.csv", "test.csv"):
        (here / name).write_text(rows)
    words = ["agnews", f"data.dir={here}", "--preset", "small", "--dry-run"]
    assert submit(*words) == 0
    assert "cannot be looked at here" not in capsys.readouterr().err
    assert submit(*words, "data.train_samples=99999") == 2
    assert "data.train_samples: 99999 rows to train on and 0 to validate on are asked for" in capsys.readouterr().err


def test_texts_that_look_like_numbers_and_flags_stay_texts(api: ApiServer, here: Path, capsys: Capture) -> None:
    """To Helm's reader of YAML `y` is true and `1e3` a number: jobs would have another image than the cluster."""
    settings = ["image.tag=1234e56", "environment.FLAG=n", "environment.ID=1e3", "workers.cpu.nodeSelector.dedicated=y"]
    text = template([*NAMED, *settings]).stdout
    api.put(next(it for it in yaml.safe_load_all(text) if it and it["metadata"]["name"] == "shoal-values"))
    found = made(capsys, "digits", "--secret", "n", "--queue", "y")
    cluster = found["RayJob"]["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        container = group["template"]["spec"]["containers"][0]
        environment = {item["name"]: item["value"] for item in container["env"] if "value" in item}
        assert (environment["FLAG"], environment["ID"]) == ("n", "1e3")
        assert container["image"].endswith(":1234e56") and {"secretRef": {"name": "n"}} in container["envFrom"]
    assert cluster["workerGroupSpecs"][-1]["template"]["spec"]["nodeSelector"] == {"dedicated": "y"}
    assert found["RayJob"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "y"


def test_a_queue_retries_and_secrets(here: Path, capsys: Capture) -> None:
    words = ["digits", "--preset", "small", "--queue", "team-a", "--retries", "0", "--ttl", "90"]
    job = made(capsys, *words, "--secret", "wandb", "--workers", "1:2")["RayJob"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    spec = job["spec"]
    assert spec["suspend"] is True and spec["shutdownAfterJobFinishes"] is True
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"]) == (0, 90)
    assert spec["rayClusterSpec"]["enableInTreeAutoscaling"] is False  # Kueue counts the pods
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {"secretRef": {"name": "wandb"}} in head["envFrom"]


def test_code_goes_along_or_is_fetched(here: Path, capsys: Capture) -> None:
    (here / "code").mkdir()
    (here / "code" / "my_task.py").write_text("x = 1\n")
    found = made(capsys, "digits", "--preset", "small", "--working-dir", "code")
    content = base64.b64decode(found["ConfigMap"]["binaryData"]["code.zip"])
    assert zipfile.ZipFile(io.BytesIO(content)).namelist() == ["my_task.py"]
    assert "file:///etc/shoal/job/code.zip" in found["RayJob"]["spec"]["runtimeEnvYAML"]
    words = ["digits", "--preset", "small", "--working-dir", "s3://bucket/code.zip"]
    assert submit(*words, "--dry-run") == 2  # it would wait for what cannot come
    assert "set networkPolicy.https, or send a folder" in capsys.readouterr().err
    found = made(capsys, *words, "--set", "networkPolicy.https=true")
    assert (
        "s3://bucket/code.zip" in found["RayJob"]["spec"]["runtimeEnvYAML"] and "binaryData" not in found["ConfigMap"]
    )


def test_secrets_stay_where_they_are(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_BUCKET", "s3cr3t-h0rse")
    assert submit("digits", "checkpoint.upload_to=s3://${env:MY_BUCKET}/x", "--preset", "small", "--dry-run") == 0
    out, err = capsys.readouterr()
    assert "s3cr3t-h0rse" not in out + err and "${env:MY_BUCKET}" in out
    assert "the recipe refers to MY_BUCKET; give the Secret that has it as --secret NAME" in err


def test_variables_of_a_secret_need_not_be_here(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_BUCKET", raising=False)
    words = ["digits", "checkpoint.upload_to=s3://${env:MY_BUCKET}/x", "--preset", "small"]
    assert submit(*words, "--dry-run") == 2
    assert "MY_BUCKET" in capsys.readouterr().err
    recipe = made(capsys, *words, "--secret", "store")["ConfigMap"]["data"]["recipe.yaml"]
    assert "s3://${env:MY_BUCKET}/x" in recipe


def test_pods_larger_than_those_that_are_installed_are_told(here: Path, capsys: Capture) -> None:
    words = ["mnist", "--workers", "4", "--gpu", "--preset", "spot", "--gpus-per-machine", "4", "--dry-run"]
    assert submit(*words) == 0
    err = capsys.readouterr().err
    assert "warning: its pods take 4 GPUs, and those of the group 'spot' 1: they may find no machine" in err


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["digits", "--preset", "smal"],
            "--preset: 'smal' is none; allowed: eks, gpu, small, spot; did",
        ),
        (["digits", "--values", "none.yaml"], "--values: there is no file none.yaml"),
        (["digits", "--preset", "small", "--set", "x"], "--set: 'x' should be KEY=VALUE"),
        (["digits", "--preset", "small", "--set", "image.tg=1"], "image.tg: there is no such value; allowed: "),
        (["digits", "--preset", "small", "--run-dir", "runs/x"], "--run-dir: 'runs/x' is not on the storage for runs"),
        *(
            (["digits", "--preset", "small", "--run-dir", f"/shared/{name}"], "holds signs that a shell would read")
            for name in ("$(id)", "x;id", "a&b", "a'b", "(a)", "a>b", "~a", "a*", "a\nb", "a#b", "a!b")
        ),
        (["digits", "--preset", "small", "--run-dir", "/shared"], "--run-dir: '/shared' is not on the storage for"),
        (["digits", "--preset", "small", "--run-dir", "/shared/../etc"], "is not on the storage for runs"),
        (["digits", "--preset", "small", "--ttl", "99999999999"], "'--ttl': 99999999999 is not in the range"),
        (["digits", "--preset", "small", "--secret", "Bad Name"], "--secret: 'Bad Name' is no name of a Secret"),
        (["digits", "--preset", "small", "--secret", ""], "--secret: '' is no name of a Secret"),
        (["--stop", "first", "--dry-run"], "--dry-run: prints what would be made, and --stop makes nothing"),
        (["digits", "--preset", "small", "--retries", "-1"], "'--retries': -1 is not in the range"),
        (["digits", "--preset", "small", "--working-dir", "none"], "--working-dir: none is no folder"),
        (["digits", "--resume", "x"], "--resume: is not for --kubernetes"),
        (["digits", "train.stepz=1", "--preset", "small"], "train.stepz"),
        (["digits", "--stop", "x"], "--stop: is for a job that was sent"),
        (
            ["digits", "cluster.gpus_per_worker=0.5", "--preset", "small"],
            "gpus_per_worker: 0.5 is part of a GPU",
        ),
    ],
)
def test_wrong_input_is_told_before_anything_is_sent(
    api: ApiServer, here: Path, capsys: Capture, words: list[str], message: str
) -> None:
    assert submit(*words) == 2
    assert message in capsys.readouterr().err and not api.objects


def test_options_of_kubernetes_want_kubernetes(here: Path, capsys: Capture) -> None:
    assert run(["submit", "digits", "--queue", "a", "--address", "http://127.0.0.1:1"]) == 2
    assert "--queue: is for --kubernetes" in capsys.readouterr().err


def test_code_and_data_that_pods_do_not_have_are_told(here: Path, capsys: Capture) -> None:
    (here / "far_task.py").write_text(TASK.replace("Slow", "Far"))
    (here / "far.yaml").write_text(yaml.safe_dump(OWN_DATA))
    words = ["--preset", "small", "--dry-run"]
    assert submit("far.yaml", *words) == 0
    assert "warning: task.name: far_task is here but not sent; send its folder with" in capsys.readouterr().err
    assert submit("far.yaml", *words, "--working-dir", ".") == 0
    assert "is here but not sent" not in capsys.readouterr().err
    assert submit("gpt2", *words) == 0
    assert "data.dir: ~/data/openwebtext is on no volume of the pods" in capsys.readouterr().err


def test_too_much_code(here: Path, capsys: Capture) -> None:
    (here / "code").mkdir()
    (here / "code" / "weights.bin").write_bytes(os.urandom(1 << 20))
    assert submit("digits", "--preset", "small", "--working-dir", "code", "--dry-run") == 2
    assert "--working-dir: code is 1,024 KiB when packed" in capsys.readouterr().err


def test_a_cluster_without_kuberay(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ApiServer(knows_ray=False)
    try:
        (here / "kubeconfig").write_text(server.kubeconfig())
        monkeypatch.setenv("KUBECONFIG", str(here / "kubeconfig"))
        assert submit("digits", "--preset", "small") == 2
        assert "install the KubeRay operator" in capsys.readouterr().err
        assert submit("--follow", "x") == 2
    finally:
        server.close()


def test_nobody_answers(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "kubeconfig").write_text(ApiServerAddress)
    monkeypatch.setenv("KUBECONFIG", str(here / "kubeconfig"))
    assert submit("digits", "--preset", "small") == 2
    assert "kubectl reaches no cluster" in capsys.readouterr().err
    assert submit("digits") == 2
    assert "kubectl reaches no cluster" in capsys.readouterr().err


ApiServerAddress = json.dumps(
    {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "current-context": "here",
    }
)


def test_a_refusal_of_the_cluster_leaves_nothing(api: ApiServer, here: Path, capsys: Capture) -> None:
    api.refuse = lambda kind, manifest: 'configmaps is forbidden: User "me" cannot' if kind == "ConfigMap" else None
    assert submit("digits", "--preset", "small") == 1
    assert "ask whoever runs the cluster" in capsys.readouterr().err and not api.objects


@pytest.mark.parametrize("is_made", [True, False])
def test_an_answer_that_is_lost_is_looked_for(api: ApiServer, here: Path, capsys: Capture, is_made: bool) -> None:
    """The connection breaks while the job is made: it was made, or it was not."""
    api.loses = lambda kind, made: kind == "RayJob" and made == is_made
    status = submit("digits", "--preset", "small", "--no-follow")
    err = capsys.readouterr().err
    kinds = sorted(kind for kind, _ in api.objects)
    if is_made:
        assert status == 0 and kinds == ["ConfigMap", "RayJob"] and "is made in the namespace" in err
        config = api.get("ConfigMap", the_job(api)["metadata"]["name"])
        assert config is not None and config["metadata"]["ownerReferences"]
    else:
        assert status == 1 and kinds == [] and "kubectl reaches no cluster" in err


def test_a_config_map_whose_answer_is_lost_is_removed(api: ApiServer, here: Path, capsys: Capture) -> None:
    api.loses = lambda kind, made: kind == "ConfigMap" and made
    assert submit("digits", "--preset", "small", "--no-follow") == 2
    assert "kubectl reaches no cluster" in capsys.readouterr().err and not api.objects


def test_why_there_is_no_job_is_told_where_cleaning_up_fails_too(api: ApiServer, here: Path, capsys: Capture) -> None:
    def refuses_and_goes_away(kind: str, manifest: dict[str, Any]) -> str | None:
        if kind == "ConfigMap":
            return None
        (here / "kubeconfig").write_text(ApiServerAddress)
        return "rayjobs.ray.io is forbidden: exceeded quota: shoal"

    api.refuse = refuses_and_goes_away
    assert submit("digits", "--preset", "small", "--no-follow") == 1
    err = capsys.readouterr().err
    assert "may be there, and belongs to nothing (--kubernetes: kubectl reaches no cluster" in err
    assert "exceeded quota: shoal" in err.splitlines()[-1]


def test_names_of_jobs_are_names(api: ApiServer, here: Path, capsys: Capture) -> None:
    """And nothing that kubectl would take for an option."""
    api.put(ray_job("first", jobDeploymentStatus="Initializing"))
    for option in ("--stop", "--follow"):
        assert submit(f"{option}=-lapp.kubernetes.io/name=shoal") == 2
        assert f"{option}: '-lapp.kubernetes.io/name=shoal' is no name of a job" in capsys.readouterr().err
    assert api.get("RayJob", "first") is not None


def test_a_server_that_goes_away_while_the_job_is_made_leaves_it_what_it_needs(
    api: ApiServer, here: Path, capsys: Capture
) -> None:
    def goes_away(kind: str, is_made: bool) -> bool:
        if kind == "RayJob" and is_made:
            (here / "kubeconfig").write_text(ApiServerAddress)
        return kind == "RayJob"

    api.loses = lambda kind, is_made: is_made and goes_away(kind, is_made)
    assert submit("digits", "--preset", "small", "--no-follow") == 1
    name = the_job(api)["metadata"]["name"]
    assert f"whether the job was made is not known; it has what it needs: kubectl get rayjob {name}" in (
        capsys.readouterr().err
    )
    assert api.get("ConfigMap", name) is not None


def test_a_job_that_is_not_there(api: ApiServer, here: Path, capsys: Capture) -> None:
    for option in ("--follow", "--stop"):
        assert submit(option, "nothing") == 1
        assert "job 'nothing': there is none in the namespace shoal" in capsys.readouterr().err
