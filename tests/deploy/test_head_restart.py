"""A head that dies and comes back, with its state in a real Redis: the run goes on as if nothing had happened."""

import json
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.observe.runs import read_events
from tests.deploy.machines import RAY_OPTIONS, Machine, Network
from tests.deploy.test_cluster_script import RECIPE, table

PORT = 6390


@dataclass
class Cluster:
    network: Network
    password: str
    folder: Path

    @property
    def head(self) -> Machine:
        return self.network.machines[0]

    @property
    def start(self) -> list[str]:
        words = [
            "--redis",
            f"{self.network.machines[2].address}:{PORT}",
            "--redis-password-file",
            str(self.folder / "pw"),
        ]
        return ["start-head", "--address", self.head.address, *words, *RAY_OPTIONS]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head; a machine that leads jobs and one that does not, of which the latter has a Redis."""
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server")
    network = Network(3)
    redis = None
    try:
        head, first, second = network.machines
        made = Cluster(network, secrets.token_hex(8), network.shared)
        (network.shared / "pw").write_text(made.password)
        config = f"bind {second.address}\nport {PORT}\nrequirepass {made.password}\ndir /tmp\nsave ''\nlogfile ''\n"
        redis = subprocess.Popen(second.command("redis-server", "-"), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert redis.stdin is not None
        redis.stdin.write(config.encode())
        redis.stdin.close()
        head.cluster(*made.start)
        head.cluster("join", "--job-drivers", first.address, *RAY_OPTIONS, "--num-cpus", "1")
        head.cluster("join", second.address, *RAY_OPTIONS, "--num-cpus", "1")
        yield made
    finally:
        network.close()
        if redis is not None:
            redis.wait()


def events_of(folder: Path) -> list[dict[str, Any]]:
    return read_events(folder) if folder.is_dir() else []


def wait_for_save(folder: Path, after: float, within_s: float = 90.0) -> float:
    """When the run saved first after that time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for event in events_of(folder):
            if event["event"] == "save" and event["time"] > after:
                return float(event["time"])
        time.sleep(0.1)
    raise AssertionError(events_of(folder)[-5:])


def send(cluster: Cluster, folder: Path) -> str:
    """Send a run that goes on until it is stopped, as a job; its name."""
    words = [*RECIPE, "train.steps=1000000", "checkpoint.every_steps=100", "--workers", "2", "--run-dir", str(folder)]
    address = f"http://{cluster.head.address}:8265"
    sent = cluster.head.run("shoal", "submit", *words, "--no-follow", "--json", "--address", address)
    assert sent.returncode == 0, sent.stderr
    return str(json.loads(sent.stdout.splitlines()[-1])["job_id"])


def check_end(cluster: Cluster, job: str, folder: Path) -> None:
    """The cluster still rules the job: stopped, it saves and ends; and until then no worker was started again, and no
    step was made twice."""
    words = ["--stop", job, "--address", f"http://{cluster.head.address}:8265"]
    stopped = cluster.head.run("shoal", "submit", *words, "--wait", timeout=60)
    assert stopped.returncode == 0 and "interrupted at step" in stopped.stdout + stopped.stderr
    names = [event["event"] for event in events_of(folder)]
    assert names.count("start") == 1 and "interrupted" in names[-2:], names[-5:]
    assert not {"failure", "restart", "forgotten", "resume"} & set(names)


def test_the_password_of_redis_is_in_no_argument_list_and_no_log(cluster: Cluster) -> None:
    processes = cluster.head.processes()
    assert any("gcs_server" in text for text in processes.values())
    assert not [text for text in processes.values() if cluster.password in text]
    (temp,) = cluster.head.tmp.glob("shoal-ray-*")
    files = [path for path in temp.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in files if cluster.password.encode() in path.read_bytes()]


@pytest.mark.timeout(300)
def test_a_run_survives_that_the_head_loses_its_power(cluster: Cluster) -> None:
    folder = cluster.network.shared / "power"
    job = send(cluster, folder)
    wait_for_save(folder, 0.0)
    cluster.head.power_off()
    wait_for_save(folder, time.time() + 2.0)  # without a head
    cluster.head.boot()
    told = cluster.head.cluster("status", status=1)
    assert table(told)["head"].endswith("DOWN")
    cluster.head.cluster(*cluster.start)
    wait_for_save(folder, time.time())
    check_end(cluster, job, folder)
    assert cluster.head.cluster("status").count("running") == 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_survives_a_head_that_is_away_for_long_and_one_without_its_gcs(cluster: Cluster) -> None:
    folder = cluster.network.shared / "long"
    job = send(cluster, folder)
    wait_for_save(folder, 0.0)
    cluster.head.power_off()
    # Agents end workers for whom nobody asks for 30 s, and Ray's own machines give up after 60 s.
    time.sleep(75)
    cluster.head.boot()
    cluster.head.cluster(*cluster.start)
    wait_for_save(folder, time.time())
    gcs = next(pid for pid, text in cluster.head.processes().items() if text.split()[0].endswith("/gcs_server"))
    cluster.head.run("kill", "-9", str(gcs))
    time.sleep(2)
    assert table(cluster.head.cluster("status", status=1))["head"].endswith("DOWN")
    cluster.head.cluster(*cluster.start)
    wait_for_save(folder, time.time())
    check_end(cluster, job, folder)


def test_cleanup_forgets_the_cluster_in_redis_too(cluster: Cluster) -> None:
    redis = cluster.network.machines[2]
    words = ["redis-cli", "-h", redis.address, "-p", str(PORT), "keys", "*"]
    password = {"REDISCLI_AUTH": cluster.password}
    if redis.run("which", "redis-cli").returncode:
        pytest.skip("there is no redis-cli")
    assert "RAY" in redis.run(*words, environment=password).stdout
    said = cluster.head.cluster("cleanup", status=1)  # without the password
    assert "SHOAL_REDIS_PASSWORD is not set" in said and "Redis: not cleaned up" in said
    assert "RAY" in redis.run(*words, environment=password).stdout
    cluster.head.cluster("cleanup", *cluster.start[5:7])
    assert redis.run(*words, environment=password).stdout.strip() == ""
