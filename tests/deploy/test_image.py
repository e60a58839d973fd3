"""The image, built for real from a local base; what runs in it; and the services of compose.yaml in containers."""

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.core.version import VERSION
from shoal.deploy.docker import files
from tests.deploy.test_docker import COMPOSE, ROOT, SERVICES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

IMAGE = f"localhost/shoal:{VERSION}"
NEEDED_BYTES = 12 << 30
LARGEST_BYTES = 2_300_000_000
LIMITS = ("--ulimit", "nofile=10000:10000", "--ulimit", "nproc=10000:10000")
"""Podman's own are above what a machine may let even root have."""


class Engine:
    """buildah and podman with storage, networks and settings of their own in a folder."""

    def __init__(self, folder: Path, driver: str) -> None:
        self.folder = folder
        storage = f'[storage]\ndriver = "{driver}"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
        (folder / "storage.conf").write_text(storage)
        (folder / "containers.conf").write_text(
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
            f'[network]\nnetwork_backend = "netavark"\nnetwork_config_dir = "{folder}/networks"\n'
        )
        (folder / "tmp").mkdir()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")} | {
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "TMPDIR": str(folder / "tmp"),
            "BUILDAH_ISOLATION": "chroot",
        }

    def run(self, *words: str | Path, check: bool = True, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            words, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        assert not check or result.returncode == 0, f"{words}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
        return result

    def inside(self, *words: str, user: str) -> subprocess.CompletedProcess[str]:
        """What a command does in the image, by buildah alone."""
        name = self.run("buildah", "from", "--pull-never", IMAGE).stdout.strip()
        try:
            return self.run("buildah", "run", "--user", user, name, "--", *words, check=False)
        finally:
            self.run("buildah", "rm", name)


def pip_settings(folder: Path) -> tuple[Path, list[str]]:
    """This machine's pip settings as one pip.conf for the build, and the options that mount what it names."""
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = dict(re.findall(r"^(?::env:\.|global\.)(\S+)='(.*)'$", told, re.MULTILINE))
    values = {name: found[name] for name in ("index-url", "extra-index-url", "find-links", "cert") if name in found}
    mounts = []
    if "cert" in values:  # whose own place the build writes to
        mounts.append(f"{values['cert']}:/run/authorities.pem:ro")
        values["cert"] = "/run/authorities.pem"
    local = [word.removeprefix("file://") for name in values if name != "cert" for word in values[name].split()]
    places = {str(path.parent if path.name == "simple" else path) for path in map(Path, local) if path.is_dir()}
    mounts += [f"{place}:{place}:ro" for place in sorted(places)]
    path = folder / "pip.conf"
    path.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
    return path, [word for mount in mounts for word in ("--volume", mount)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """With the image in its storage."""
    if os.geteuid() != 0:
        pytest.skip("debootstrap and buildah's chroot isolation need root")
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: apt install {program})")
    folder = Path(tempfile.mkdtemp(prefix="si-", dir="/tmp"))
    try:
        if shutil.disk_usage(folder).free < NEEDED_BYTES:
            pytest.skip(f"needs {NEEDED_BYTES >> 30} GiB of disk")
        yield build(folder)
    finally:
        graph = folder / "graph" / "overlay"
        if graph.is_mount():  # as buildah leaves it
            subprocess.run(["umount", graph], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def build(folder: Path) -> Engine:
    """The image, from a base that debootstrap makes: no registry is asked."""
    # vfs works everywhere, and copies the gigabytes of every layer.
    probe = ["buildah", "--root", f"{folder}/p", "--runroot", f"{folder}/q", "--storage-driver", "overlay", "info"]
    overlay = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    engine = Engine(folder, "overlay" if overlay else "vfs")
    base = folder / "base"
    engine.run(
        *("debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", base)
    )
    name = engine.run("buildah", "from", "scratch").stdout.strip()
    engine.run("buildah", "add", "--quiet", name, base, "/")
    engine.run("buildah", "commit", "--rm", "--quiet", name, "localhost/base")
    shutil.rmtree(base)
    pip_conf, mounts = pip_settings(folder)
    engine.run(
        *("nice", "buildah", "build", "--format", "docker", "--layers=false", "--build-arg", "BASE=localhost/base"),
        *("--secret", f"id=pip.conf,src={pip_conf}", *mounts, "--tag", IMAGE),
        *("--file", ROOT / "deploy/docker/Dockerfile", ROOT),
    )
    return engine


def test_the_image_is_small_and_holds_what_it_says(engine: Engine) -> None:
    (told,) = json.loads(engine.run("buildah", "images", "--json", IMAGE).stdout)
    inspected = json.loads(engine.run("buildah", "inspect", "--type", "image", IMAGE).stdout)
    config = inspected["Docker"]["config"]
    number, unit = re.fullmatch(r"([\d.]+) ?([MG])B", told["size"]).groups()  # type: ignore[union-attr]
    assert float(number) * {"M": 1e6, "G": 1e9}[unit] < LARGEST_BYTES
    assert config["User"] == "1000:1000" and config["StopSignal"] == "SIGTERM"
    assert config["Labels"]["org.opencontainers.image.version"] == VERSION
    assert config["Healthcheck"]["Test"] == ["CMD", "shoal-healthcheck"]
    look = "type -P gcc g++ cc; ls -d /etc/pip.conf /build; type -P python ray shoal wget openssl"
    found = engine.inside("bash", "-c", look, user="1000:1000").stdout.split()
    assert found == ["/opt/shoal/bin/python", "/opt/shoal/bin/ray", "/opt/shoal/bin/shoal", *found[3:]]
    assert [Path(path).name for path in found[3:]] == ["wget", "openssl"]
    packaged = "from shoal.deploy.docker import files; print(*files())"
    assert engine.inside("python", "-c", packaged, user="1000:1000").stdout.split() == list(files())
    history = json.dumps(inspected["History"]) + json.dumps(config)
    for value in re.findall(r"^\S+ = (.*)$", (engine.folder / "pip.conf").read_text(), re.MULTILINE):
        assert value not in history


@pytest.mark.parametrize("user", ["1000:1000", "4711:0"])
def test_the_doctor_finds_nothing_wrong_for_a_user_who_is_not_root(engine: Engine, user: str) -> None:
    result = engine.inside("shoal", "doctor", "--json", user=user)
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["status"] in ("pass", "warn")
    words = json.dumps(told["checks"])
    assert f"uid {user.partition(':')[0]}" in words


def test_the_doctor_says_what_is_wrong(engine: Engine) -> None:
    """So that the test above could fail: a home that cannot be written is told of."""
    result = engine.inside("sh", "-c", "cd / && HOME=/proc shoal doctor --json", user="1000:1000")
    told = json.loads(result.stdout.splitlines()[-1])
    assert any("not writable" in json.dumps(check) for check in told["checks"])


def podman_words(service: Mapping[str, Any], where: Path) -> list[str]:
    """What compose.yaml says of a container, as podman's options."""
    limits = service["deploy"]["resources"]["limits"]
    words = ["--user", service["user"], "--pids-limit", str(service["pids_limit"]), "--memory", limits["memory"]]
    words += ["--cpus", limits["cpus"]]
    words += ["--read-only"] if service["read_only"] else []
    words += [word for name in service["cap_drop"] for word in ("--cap-drop", name)]
    words += [word for name in service["security_opt"] for word in ("--security-opt", name.removesuffix(":true"))]
    words += [word for value in service.get("tmpfs", []) for word in ("--tmpfs", value)]
    words += ["--shm-size", service["shm_size"]] if "shm_size" in service else []
    for name, value in service.get("environment", {}).items():
        words += ["--env", f"{name}={value}"]
    for name in service.get("secrets", []):
        words += ["--volume", f"{where / COMPOSE['secrets'][name]['file']}:/run/secrets/{name}:ro"]
    for volume in service.get("volumes", []):
        words += ["--volume", f"{where}/{volume[2:]}" if volume.startswith("./") else f"si-{volume}"]
    return words


class Cluster:
    """Services of compose.yaml in containers, on a network where they know each other by name."""

    def __init__(self, engine: Engine, where: Path) -> None:
        self.engine, self.where = engine, where
        self.tag = f"si{os.getpid()}"
        self.names: list[str] = []
        engine.run("podman", "network", "create", "--driver", "bridge", self.tag)

    def start(self, service: str, number: int = 1, *, image: str = IMAGE, options: tuple[str, ...] = ()) -> str:
        """As compose would, but for ports of the machine and restarts."""
        name = f"{self.tag}-{service}-{number}"
        content = SERVICES[service]
        command = content["command"]
        words = shlex.split(command) if isinstance(command, str) else command
        self.names.append(name)
        self.engine.run(
            *("podman", "run", "--detach", "--name", name, "--network", self.tag, "--network-alias", service),
            *(*LIMITS, "--no-healthcheck", *podman_words(content, self.where), *options, image, *words),
        )
        return name

    def inside(self, name: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.engine.run("podman", "exec", name, *words, check=check)

    def wait_healthy(self, name: str, service: str) -> None:
        """By the health check of compose.yaml, for as long as it allows at a start."""
        test = SERVICES[service]["healthcheck"]["test"]
        until(lambda: self.inside(name, *test[1:], check=False).returncode == 0, lambda: self.log(name))

    def log(self, name: str) -> str:
        told = self.engine.run("podman", "logs", name, check=False)
        return told.stdout[-4000:] + told.stderr[-4000:]

    def address(self, name: str) -> str:
        settings = json.loads(self.engine.run("podman", "inspect", name).stdout)[0]["NetworkSettings"]
        return str(settings["Networks"][self.tag]["IPAddress"])

    def close(self) -> None:
        for name in reversed(self.names):
            self.engine.run("podman", "rm", "--force", "--time", "2", name, check=False)
        self.engine.run("podman", "volume", "rm", "--all", "--force", check=False)
        self.engine.run("podman", "network", "rm", "--force", self.tag, check=False)


def until(holds: Callable[[], bool], why: Callable[[], str], within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, why()
        time.sleep(0.5)


def get(url: str, token: str | None = None) -> tuple[int, str]:
    """Status and body."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="module")
def containers(engine: Engine) -> Engine:
    """Where podman really runs containers."""
    if shutil.which("podman") is None or shutil.which("runc") is None:
        pytest.skip("podman and runc are not installed (Debian: apt install podman runc netavark aardvark-dns)")
    tried = engine.run("podman", "run", "--rm", *LIMITS, "--no-healthcheck", IMAGE, "true", check=False)
    if tried.returncode:
        pytest.skip(f"podman cannot run containers here: {tried.stderr.strip()[-200:]}")
    return engine


@pytest.fixture
def cluster(containers: Engine) -> Iterator[Cluster]:
    """Nothing runs in it yet."""
    where = containers.folder / "compose"
    for name, text in files().items():
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (where / "secrets").mkdir(mode=0o700)
    os.chown(where / "secrets", 1000, 1000)
    containers.folder.chmod(0o711)
    for name in COMPOSE["secrets"]:
        path = where / "secrets" / name
        path.write_text(f"{secrets.token_hex(32)}\n")  # with the end of line that openssl writes
        path.chmod(0o600)
        os.chown(path, 1000, 1000)
    cluster = Cluster(containers, where)
    try:
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(where)


def test_a_run_saves_when_its_container_is_stopped(containers: Engine, tmp_path: Path) -> None:
    runs = containers.folder / "runs"
    runs.mkdir()
    os.chown(runs, 1000, 1000)
    service = SERVICES["worker"] | {"volumes": [], "secrets": [], "environment": {}}
    words = podman_words(service, tmp_path)
    train = shlex.split("shoal train digits train.steps=1000000 observe.every_steps=50 --run-dir /shared/first")
    name = f"si{os.getpid()}-train"
    try:
        containers.run(
            *("podman", "run", "--detach", "--name", name, *LIMITS, "--network", "none", "--no-healthcheck", *words),
            *("--volume", f"{runs}:/shared", IMAGE, *train),
        )
        metrics = runs / "first" / "metrics.jsonl"
        until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2,
            lambda: containers.run("podman", "logs", name).stdout,
        )
        containers.run("podman", "stop", "--time", "60", name)
        status = json.loads(containers.run("podman", "inspect", name).stdout)[0]["State"]["ExitCode"]
    finally:
        containers.run("podman", "rm", "--force", name, check=False)
    assert status == 130
    events = [json.loads(line) for line in (runs / "first" / "events.jsonl").read_text().splitlines()]
    assert "save" in {event["event"] for event in events}
    assert list((runs / "first" / "checkpoints").glob("step-*/manifest.json"))


def test_ray_does_not_start_without_a_token(containers: Engine) -> None:
    command = shlex.split(SERVICES["head"]["command"])
    options = ("--rm", *LIMITS, "--network", "none", "--no-healthcheck", "--shm-size", "1g")
    result = containers.run("podman", "run", *options, IMAGE, "timeout", "60", *command, check=False)
    assert result.returncode not in (0, 124) and "token" in (result.stdout + result.stderr).lower()


def test_the_services_of_compose_train_together(cluster: Cluster) -> None:
    head = cluster.start("head")
    cluster.wait_healthy(head, "head")
    workers = [cluster.start("worker", number) for number in (1, 2)]
    mlflow = cluster.start("mlflow")
    for worker in workers:
        cluster.wait_healthy(worker, "worker")
    cluster.wait_healthy(mlflow, "mlflow")

    dashboard = f"http://{cluster.address(head)}:8265"
    token = (cluster.where / "secrets/ray_token").read_text().strip()
    assert get(f"{dashboard}/api/jobs/")[0] in (401, 403)
    assert get(f"{dashboard}/api/jobs/", "0" * 64)[0] in (401, 403)
    assert get(f"{dashboard}/api/jobs/", token)[0] == 200

    submit = "shoal submit digits train.steps=60 track.mlflow=true --workers 4 --run-dir /shared/runs/first --json"
    told = cluster.inside(head, *shlex.split(f"{submit} --address http://127.0.0.1:8265"))
    summary = json.loads(told.stdout.splitlines()[-1])["summary"]
    assert summary["status"] == "done" and summary["step"] == 60 and summary["world_size"] == 4
    events = cluster.inside(head, "cat", "/shared/runs/first/events.jsonl").stdout.splitlines()
    (placed,) = [event for event in map(json.loads, events) if event["event"] == "workers"]
    assert len({worker["host"] for worker in placed["workers"]}) == 2, "two trainers in each container"

    search = "import mlflow; print([run.info.status for run in mlflow.search_runs(search_all_experiments=True,"
    search += " output_format='list')])"
    assert "FINISHED" in cluster.inside(head, "python", "-c", search).stdout
    query = start_prometheus(cluster)
    until(lambda: len(query("up == 1")) == 3, lambda: f"{query('up')}\n{cluster.log(cluster.names[-1])}")
    addresses = {result["metric"]["instance"] for result in query("up == 1")}
    assert addresses == {f"{cluster.address(name)}:8080" for name in (head, *workers)}

    # A node that hangs is found by the check that compose.yaml asks.
    hang(cluster, workers[0])
    assert cluster.inside(workers[0], *SERVICES["worker"]["healthcheck"]["test"][1:], check=False).returncode != 0


def hang(cluster: Cluster, worker: str) -> None:
    """Halt all of a node's processes but the first, from outside."""
    (state,) = json.loads(cluster.engine.run("podman", "inspect", worker).stdout)
    first = str(state["State"]["Pid"])
    told = subprocess.run(
        ["pgrep", "--ns", first, "--nslist", "pid", "raylet|ray::"], capture_output=True, text=True, check=True
    )
    for pid in map(int, told.stdout.split()):
        os.kill(pid, signal.SIGSTOP)


def start_prometheus(cluster: Cluster) -> Callable[[str], list[dict[str, Any]]]:
    """This machine's program with the arguments and files of compose.yaml, in place of the image that is not here;
    what asks it."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed (Debian: apt install prometheus)")
    options = ("--volume", f"{binary}:/usr/local/bin/prometheus:ro", "--entrypoint", "/usr/local/bin/prometheus")
    name = cluster.start("prometheus", image="localhost/base", options=options)
    url = f"http://{cluster.address(name)}:9090/api/v1/query?query="

    def query(expression: str) -> list[dict[str, Any]]:
        try:
            status, body = get(url + urllib.parse.quote(expression))
        except OSError:  # it starts
            return []
        return list(json.loads(body)["data"]["result"]) if status == 200 else []

    return query
