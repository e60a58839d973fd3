"""The doctor on a cluster of three hosts with addresses of their own: a head that takes no work, and two that do."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.deploy.doctor.cluster import _judge_connection
from tests.launch.hosts import Hosts, NotPermittedError

SHOAL = Path(sys.executable).with_name("shoal")
HOLD = """
import ray, sys, time
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_cpus=1)
class Holder:
    def ready(self): return True
holder = Holder.remote()
ray.get(holder.ready.remote())
print("holds", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        found = Hosts(3)
    except NotPermittedError as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")
    yield found
    found.close()


@dataclass
class Told:
    """What `shoal doctor --json` said."""

    status: int
    text: str
    record: dict[str, Any]

    def of(self, check: str) -> dict[str, Any]:
        (found,) = [one for one in self.record["checks"] if one["check"] == check and one["group"] == "cluster"]
        return dict(found)

    def failed(self) -> set[str]:
        return {one["check"] for one in self.record["checks"] if one["level"] == "fail"}


def ask(hosts: Hosts, *arguments: str, environment: dict[str, str] | None = None) -> Told:
    """On the head."""
    command = hosts.command(1, str(SHOAL), "doctor", "--address", hosts.cluster, "--json", *arguments)
    environment = environment or hosts.environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=180)
    return Told(done.returncode, done.stderr, json.loads(done.stdout.splitlines()[-1]))


def ours(hosts: Hosts) -> list[str]:
    """What the doctor has started on the hosts and still runs."""
    found = []
    for host in range(1, hosts.number + 1):
        pids = subprocess.run(["ip", "netns", "pids", hosts.name(host)], capture_output=True, text=True, check=True)
        for pid in pids.stdout.split():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if "ray::Probe" in words or "reduce_rank" in words or "doctor.devices" in words:
                found.append(words)
    return found


def wait_until_left(hosts: Hosts, within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while left := ours(hosts):
        assert time.monotonic() < until, left
        time.sleep(0.2)


def test_a_cluster_that_is_well(hosts: Hosts, tmp_path: Path) -> None:
    told = ask(hosts, "--storage", str(tmp_path))
    assert told.failed() == set() and told.status == 0, told.text
    assert told.record["status"] in ("pass", "warn")
    assert told.of("nodes")["found"] == "3 alive, 2 of them for workers: 2 CPU, 0 GPU"
    assert told.of("versions")["level"] == told.of("time skew")["level"] == told.of("connections")["level"] == "pass"
    assert told.of("connections")["found"] == "3 pairs of machines, each way"
    # The head takes no work, so it does not train either.
    assert told.of("all-reduce")["found"].startswith("2 ranks on 2 machines, the sum is right")
    assert "written by 3 machines and read by each" in told.of("storage")["found"]
    assert told.of("storage locks")["level"] == "pass"
    looked_at = {one["node"] for one in told.record["checks"] if one["group"] == "nodes"}
    assert looked_at == {hosts.address(host) for host in (1, 2, 3)}
    assert list(tmp_path.iterdir()) == []
    wait_until_left(hosts)


def test_workers_that_cannot_reach_each_other_and_storage_that_one_does_not_have(hosts: Hosts, tmp_path: Path) -> None:
    routes = [(2, 3), (3, 2)]
    inside = ["nsenter", "--target", str(hosts.rays[3].pid), "--mount"]
    if shutil.which("nsenter") is None:
        pytest.skip("there is no nsenter command")
    for host, other in routes:
        _ip(hosts, host, "route", "add", "unreachable", hosts.address(other))
    subprocess.run([*inside, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], check=True)
    try:
        told = ask(hosts, "--storage", str(tmp_path))
    finally:
        subprocess.run([*inside, "umount", str(tmp_path)], check=True)
        for host, other in routes:
            _ip(hosts, host, "route", "del", "unreachable", hosts.address(other))
    assert told.status == 1 and told.record["status"] == "fail"
    assert told.failed() == {"connections", "all-reduce", "storage"}
    assert f"{hosts.address(2)} cannot reach {hosts.address(3)} (No route to host)" in told.of("connections")["found"]
    assert "security group" in told.of("connections")["advice"]
    assert f"rank 1 on {hosts.address(3)} failed, reaching the machine of rank 0" in told.of("all-reduce")["found"]
    assert told.of("storage")["found"].startswith(f"{hosts.address(3)} and the other 2 do not see")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # a second program on the cluster, and a network of 80 Mbit/s
def test_a_slow_machine_while_others_use_the_cluster(hosts: Hosts) -> None:
    link = [
        "tc",
        "qdisc",
        "add",
        "dev",
        hosts.link(3),
        "root",
        "tbf",
        "rate",
        "80mbit",
        "burst",
        "32kb",
        "latency",
        "50ms",
    ]
    if shutil.which("tc") is None or subprocess.run(link, capture_output=True, check=False).returncode:
        pytest.skip("this machine cannot make a network slow")
    holder = subprocess.Popen(
        hosts.command(1, sys.executable, "-c", HOLD, hosts.cluster),
        env=hosts.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        told = ask(hosts)
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.communicate()
        subprocess.run(["tc", "qdisc", "del", "dev", hosts.link(3), "root"], check=True)
    bandwidth = told.of("bandwidth")
    assert told.failed() == set() and told.status == 0, told.text
    assert bandwidth["level"] == "warn" and f"all of them with {hosts.address(3)}" in bandwidth["found"]
    assert "(while others use 1 of 2 CPU)" in bandwidth["found"]
    # What is sent to the slow machine passes its link at 80 Mbit/s, whatever else goes on.
    assert f"to {hosts.address(3)} " in bandwidth["found"]
    assert told.of("all-reduce")["level"] == "pass"


def test_ctrl_c_leaves_nothing(hosts: Hosts, tmp_path: Path) -> None:
    command = hosts.command(1, str(SHOAL), "doctor", "--address", hosts.cluster, "--storage", str(tmp_path))
    process = subprocess.Popen(
        command,
        env=hosts.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "bandwidth" in line:  # the ranks are being started
            break
    until = time.monotonic() + 10
    while not any("reduce_rank" in words for words in ours(hosts)):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 130
    process.communicate()
    wait_until_left(hosts)
    assert list(tmp_path.iterdir()) == []


def test_a_token_that_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    token = "b" * 64
    began = time.monotonic()
    told = ask(hosts, environment=hosts.environment | {"RAY_AUTH_TOKEN": token})
    assert time.monotonic() - began < 10.0  # Ray itself would try for 20 s
    assert told.status == 1 and told.of("connect")["found"] == "the cluster refuses the token of RAY_AUTH_TOKEN"
    assert "unset it if the head's token is in a file here" in told.of("connect")["advice"]
    assert token not in told.text and "InvalidAuthToken" not in told.text and "Traceback" not in told.text
    file = tmp_path / "token"
    file.write_text(token)
    others = {name: value for name, value in hosts.environment.items() if name != "RAY_AUTH_TOKEN"}
    told = ask(hosts, environment=others | {"RAY_AUTH_TOKEN_PATH": str(file)})
    assert told.of("connect")["found"] == f"the cluster refuses the token of {file} (RAY_AUTH_TOKEN_PATH)"
    assert f"auth_token to {file}" in told.of("connect")["advice"] and token not in told.text


def process_on(hosts: Hosts, host: int, name: str) -> int:
    """The one of Ray's processes on a host that has this name."""
    pids = subprocess.run(["ip", "netns", "pids", hosts.name(host)], capture_output=True, text=True, check=True)
    (found,) = [int(pid) for pid in pids.stdout.split() if Path(f"/proc/{pid}/comm").read_text().strip() == name]
    return found


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_gcs_that_does_not_answer_is_told(hosts: Hosts) -> None:
    began = time.monotonic()
    with frozen(process_on(hosts, 1, "gcs_server")):
        told = ask(hosts)
    assert time.monotonic() - began < 30.0
    assert told.status == 1 and told.record["status"] == "fail" and "Traceback" not in told.text
    assert told.of("connect")["found"] == f"{hosts.cluster}: its GCS does not answer within 10 s"
    assert "restart it" in told.of("connect")["advice"]


@pytest.mark.parametrize("frozen_one", ["gcs_server", "raylet"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_for_one_that_does_not_answer_may_end_it(
    hosts: Hosts, frozen_one: str, number: signal.Signals
) -> None:
    command = hosts.command(1, str(SHOAL), "doctor", "--address", hosts.cluster, "--json")
    with frozen(process_on(hosts, 1, frozen_one)):
        process = subprocess.Popen(
            command, env=hosts.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        time.sleep(4.0)
        assert process.poll() is None
        process.send_signal(number)
        out, text = process.communicate(timeout=10)
    assert process.returncode == 130 and out == "" and "Traceback" not in text


@pytest.mark.slow  # Ray needs half a minute
def test_a_raylet_that_does_not_answer_is_told(hosts: Hosts) -> None:
    """Ray then ends the process that connects, or lets it wait."""
    with frozen(process_on(hosts, 1, "raylet")):
        told = ask(hosts)
    assert told.status == 1 and f"connecting to {hosts.cluster}" in told.of("connect")["found"]


@pytest.mark.slow
def test_the_disk_that_ray_uses_is_looked_at(hosts: Hosts) -> None:
    disk = hosts.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this user may not mount a file system")
    leave(hosts, 3)
    try:
        hosts.start(3, "--address", hosts.cluster, "--num-cpus", "1", "--temp-dir", str(disk))
        told = ask(hosts)
        leave(hosts, 3)
    finally:
        hosts.kill(3)
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
        hosts.join(3)
    found = {one["node"]: one for one in told.record["checks"] if one["check"] == "ray folder"}
    small, other = found[hosts.address(3)], found[hosts.address(2)]
    assert small["level"] == "fail" and small["found"].startswith(f"{disk}: ") and "MiB free" in small["found"]
    assert other["level"] != "fail" and other["found"].startswith(f"{hosts.folder / 'ray'}: ")


def leave(hosts: Hosts, host: int) -> None:
    """Have it leave the cluster, which hears of it at once."""
    hosts.rays[host].terminate()
    hosts.rays[host].wait(timeout=30)
    hosts.kill(host)


@pytest.mark.slow  # Ray needs half a minute to give up a host
def test_a_host_that_is_cut_off(hosts: Hosts) -> None:
    hosts.cut(3)
    try:
        told = ask(hosts)
        is_noticed = told.of("nodes")["level"] == "warn"
        assert is_noticed or told.of("answers")["level"] == "fail"
        until = time.monotonic() + 60
        while not is_noticed:
            assert time.monotonic() < until
            told = ask(hosts)
            is_noticed = told.of("nodes")["level"] == "warn"
        assert f"gone: {hosts.address(3)}" in told.of("nodes")["found"] and told.status == 0
    finally:
        hosts.mend(3)
    told = ask(hosts)
    assert told.of("nodes")["level"] == "pass", told.text  # one that was started again is there


def _ip(hosts: Hosts, host: int, *words: str) -> None:
    subprocess.run(["ip", "-n", hosts.name(host), *words], check=True)


# ---------------------------------------------------------------- without a cluster


@pytest.mark.parametrize(
    ("words", "found", "advice"),
    [
        ("--address: no cluster (refused); start one, or leave this out", "no cluster (refused)", "start one"),
        ("no answer at 'ray://h:1'; start one", "no answer at 'ray://h:1'", "start one; it needs ray[client]"),
        ("Ray is broken", "Ray is broken", "ray status"),
    ],
)
def test_why_there_is_no_connection(words: str, found: str, advice: str) -> None:
    finding = _judge_connection(words)
    assert (finding.level, finding.found) == ("fail", found) and advice in finding.advice
