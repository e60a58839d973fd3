"""`shoal deploy`: files to start clusters from."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shoal.cli.main import run
from shoal.core.version import VERSION
from shoal.deploy.docker import files
from shoal.deploy.programs import find

Capture = pytest.CaptureFixture[str]
IMAGE = ["--image", "ami-0123456789abcdef0"]
NAMED = ["--set", "storage.runs.storageClass=nfs"]


def test_a_cluster_for_a_recipe(here: Path, capsys: Capture) -> None:
    words = ["deploy", "kubernetes", "mnist", "--workers", "2:6", "--namespace", "vision", *NAMED]
    assert run(words) == 0
    found = [document for document in yaml.safe_load_all(capsys.readouterr().out) if document]
    namespace = next(one for one in found if one["kind"] == "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    cluster = next(one for one in found if one["kind"] == "RayCluster")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["maxReplicas"]) == (2, 6)
    assert all(one["metadata"].get("namespace", "vision") == "vision" for one in found)


def test_more_memory_for_a_larger_model(here: Path, capsys: Capture) -> None:
    sizes = []
    for width in (128, 8192):
        words = [f"model.hidden=[{width},{width}]", "train.global_batch=64", "--workers", "2", "--values-only"]
        assert run(["deploy", "kubernetes", "synthetic_mlp", *words]) == 0
        sizes.append(yaml.safe_load(capsys.readouterr().out)["workers"]["cpu"]["memory"])
    assert int(sizes[0].removesuffix("Gi")) < int(sizes[1].removesuffix("Gi"))


def test_values_for_helm_install_hold_the_preset_and_the_recipe(here: Path, capsys: Capture) -> None:
    named = "storage.runs.storageClass=nfs,environment.B=two words"
    (here / "mine.yaml").write_text("head: {cpu: 3}\nenvironment: {A: '1e5'}\n")
    words = ["--preset", "gpu", "--values", "mine.yaml", "--set", named, "--values-only", "-o", "my values.yaml"]
    assert run(["deploy", "kubernetes", "mnist", "--workers", "16", "--gpu", *words]) == 0
    values = yaml.safe_load((here / "my values.yaml").read_text())
    assert values["head"] == {"cpu": 3, "memory": "32Gi"} and values["environment"] == {"A": "1e5"}
    assert values["workers"]["gpu"]["maxReplicas"] == 2 and values["workers"]["leader"]["leads"] is True
    assert values["workers"]["gpu"]["shm"] == "32Gi"  # as the recipe needs it, instead of the preset's
    _, _, command = capsys.readouterr().err.partition("next: ")
    program, verb, *rest = shlex.split(command)  # what is told can be typed; here it renders
    assert (program, verb) == ("helm", "install")
    result = subprocess.run([find("helm"), "template", *rest], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert 'value: "1e5"' in result.stdout and 'value: "two words"' in result.stdout


def test_ctrl_c_while_libraries_are_imported(here: Path) -> None:
    """Some of them lose it, or call it an error of their own."""
    for library in ("_multiarray_umath", "libtorch_cpu", "libc10"):
        words = [
            sys.executable,
            "-m",
            "shoal.cli.main",
            "deploy",
            "kubernetes",
            "digits",
            "--preset",
            "small",
            "-o",
            "x",
        ]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
            while library not in Path(f"/proc/{process.pid}/maps").read_text():
                assert process.poll() is None, library
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "interrupted before anything was written\n")
    assert not (here / "x").exists()


def test_to_a_file(here: Path, capsys: Capture) -> None:
    assert run(["deploy", "kubernetes", "--preset", "small", "-o", "cluster.yaml"]) == 0
    assert "next: kubectl apply -f cluster.yaml" in capsys.readouterr().err
    assert "kind: RayCluster" in (here / "cluster.yaml").read_text()


def test_docker(here: Path, capsys: Capture) -> None:
    for _ in range(2):  # again over its own
        assert run(["deploy", "docker", "-o", "mine"]) == 0
    for name, text in files().items():
        assert (here / "mine" / name).read_text() == text
    (here / "other").mkdir()
    (here / "other" / "thesis.tex").touch()
    assert run(["deploy", "docker", "-o", "other"]) == 2
    assert "--output: other holds other things" in capsys.readouterr().err
    assert [file.name for file in (here / "other").iterdir()] == ["thesis.tex"]


def test_aws(here: Path, capsys: Capture) -> None:
    words = ["deploy", "aws", "gpt2", "--workers", "1:16", "--gpu", "--spot", "--efs", "fs-0123456789abcdef0", *IMAGE]
    assert run([*words, "-o", "cluster.yaml"]) == 0
    told = capsys.readouterr().err
    assert "ray up cluster.yaml" in told and "warning" not in told
    found = yaml.safe_load((here / "cluster.yaml").read_text())
    assert found["max_workers"] == 2 and "spot" in str(found["available_node_types"]["ray.worker.default"])
    assert run(["deploy", "aws", "gpt2", "--workers", "16", "--gpu"]) == 2
    assert "--efs: is missing" in capsys.readouterr().err


def test_aws_without_shared_storage_is_warned_of(here: Path, capsys: Capture) -> None:
    assert run(["deploy", "aws", "digits", *IMAGE]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["max_workers"] == 1
    assert err.startswith("warning: --efs: is not given, so there is no /shared") and err.count("\n") == 1
    assert "to keep it, give --efs, or checkpoint.upload_to=s3://BUCKET/FOLDER" in err
    assert run(["deploy", "aws", "digits", *IMAGE, "checkpoint.upload_to=s3://bucket/runs"]) == 0
    err = capsys.readouterr().err
    assert "there is no /shared" in err and "upload_to" not in err


def test_a_compose_file_of_the_user_stays(here: Path, capsys: Capture) -> None:
    (here / "foreign").mkdir()
    (here / "foreign" / "compose.yaml").write_text("mine\n")
    assert run(["deploy", "docker", "-o", "foreign"]) == 2
    assert "--output: foreign holds a compose.yaml that is not Shoal's; give a new folder" in capsys.readouterr().err
    assert [file.read_text() for file in (here / "foreign").iterdir()] == ["mine\n"]
    for empty in ("", " "):
        assert run(["deploy", "docker", "-o", empty]) == 2
        assert capsys.readouterr().err == "error: --output: is empty; give the name of a folder\n"


def test_docker_says_what_comes_next_from_anywhere(here: Path, capsys: Capture) -> None:
    assert run(["deploy", "docker", "-o", "my cluster"]) == 0
    build, _, then = capsys.readouterr().err.partition("\nthen: ")
    assert build.endswith(f"docker build -f deploy/docker/Dockerfile -t localhost/shoal:{VERSION} .")
    assert shlex.split(then.partition(", ")[0]) == ["cd", str((here / "my cluster").resolve())]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "smal"], "--preset: 'smal' is none; allowed: eks, gpu, small, spot; did you mean small?"),
        (["--set", "workers.cpu.gpus=-1", *NAMED], "workers.cpu.gpus: -1 should be a whole number, 0 or more"),
        (["--set", "workers.cpu.minReplicas=9", *NAMED], "workers.cpu.minReplicas: 9 is more than maxReplicas, 4"),
        ([], "storage.runs.storageClass: is missing; name a class"),
        (["--set", "storage", *NAMED], "--set: 'storage' should be KEY=VALUE"),
        (["digts"], "did you mean digits?"),
        (["digits", "--gpu", "--workers", "2", "--gpus-per-machine", "0"], "--gpus-per-machine"),
        (["digits", "cluster.gpus_per_worker=0.5", *NAMED], "cluster.gpus_per_worker: 0.5 is part of a GPU"),
        (["--cpus", "2", *NAMED], "--cpus, --gpu-memory, --gpus-per-machine: are about the workers of a recipe"),
        (["--gpus-per-machine", "2", *NAMED], "are about the workers of a recipe; give one, or use --set workers"),
        (["digits", "--values-only", "--set", "head.cpu=x"], "head.cpu: 'x' should be a number of cores"),
        (["--preset", "small", "-o", "none/cluster.yaml"], "--output: there is no folder none"),
        (["--values", "none.yaml"], "--values: there is no file none.yaml"),
    ],
)
def test_wrong_input(here: Path, capsys: Capture, words: list[str], message: str) -> None:
    assert run(["deploy", "kubernetes", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("error: ") and err.count("\n") == 1
    assert list(here.iterdir()) == []


def test_without_helm(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    monkeypatch.setattr("sys.executable", str(here / "python"))
    assert run(["deploy", "kubernetes", "--preset", "small"]) == 2
    assert "helm: is not on the path. Helm renders the chart: install it" in capsys.readouterr().err
