"""A cluster that `cluster.sh` has started: what of it answers on which network, and whom."""

import json
import re
import stat
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.machines import BINARIES, RAY_OPTIONS, SCRIPT, Machine, Network

PORTS = {"gcs": 6379, "raylet": 6380, "objects": 6381, "agent": 6384, "client": 10001}
HTTP_PORTS = {"runtime environments": 6382, "dashboard's agent": 6383, "dashboard": 8265}
METRICS_PORTS = (6385, 6386, 6387)
_PROBE = """
    # Call one method of each service that a port serves, without a token, with a wrong one and with the right one.
    import json, sys
    import grpc

    METHODS = {
        "gcs": "NodeInfoGcsService/GetAllNodeInfo",
        "raylet": "NodeManagerService/GetNodeStats",
        "objects": "ObjectManagerService/Pull",
        "agent": "ReporterService/ReportOCMetrics",
        "client": "RayletDriver/KVGet",
        "worker": "CoreWorkerService/GetCoreWorkerStats",
    }

    def answer(target, what, token):
        sent = [("authorization", f"Bearer {token}")] if token else []
        with grpc.insecure_channel(target) as channel:
            try:
                channel.unary_unary(f"/ray.rpc.{METHODS[what]}")(b"", metadata=sent, timeout=10)
            except grpc.RpcError as error:
                return error.code().name
        return "OK"

    host, ports, token = sys.argv[1], json.loads(sys.argv[2]), sys.stdin.readline().strip()
    tokens = ("", "0" * 64, token)
    print(json.dumps({what: [answer(f"{host}:{port}", what, one) for one in tokens] for what, port in ports.items()}))
"""
_WORKER = """
    # A worker on the head, for as long as nobody writes to stdin.
    import sys
    import ray

    ray.init(address="auto", log_to_driver=False)
    ray.get(ray.remote(num_cpus=0)(lambda: None).remote())
    print("ready", flush=True)
    sys.stdin.readline()
"""
_LIST = ["python", "-m", "shoal.deploy.nodes", "list"]


@dataclass
class Cluster:
    network: Network
    head: Machine
    other: Machine
    token: str

    def write(self, name: str, text: str) -> str:
        file = self.network.shared / name
        file.write_text(textwrap.dedent(text))
        return str(file)

    def reaches(self, address: str, port: int) -> bool:
        """Whether the other machine gets a connection."""
        words = ["timeout", "2", "bash", "-c", f": </dev/tcp/{address}/{port}"]
        return self.other.run(*words).returncode == 0

    def http(self, machine: Machine, url: str, *words: str, token: str = "") -> str:
        """The status that a URL answers with; 000 where nobody does."""
        sent = ["-H", f"Authorization: Bearer {token}"] if token else []
        return str(
            machine.run("curl", "-s", "-m", "5", "-o", "/dev/null", "-w", "%{http_code}", *sent, *words, url).stdout
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and a machine that has joined; both have a second network."""
    network = Network(2)
    try:
        head, other = network.machines
        head.cluster("start-head", "--interface", "eth0", *RAY_OPTIONS)
        head.cluster("join", other.address, *RAY_OPTIONS)
        yield Cluster(network, head, other, (head.home / ".ray" / "auth_token").read_text())
    finally:
        network.close()


def beyond_loopback(machine: Machine) -> set[int]:
    listening = machine.listening()
    return {port for port, at in listening.items() if not all("127.0.0.1" in one or one == "[::1]" for one in at)}


def test_only_the_ports_that_the_table_names_are_open(cluster: Cluster) -> None:
    named = {22, 8265, 10001, *range(6379, 6388)}
    assert {port for port in beyond_loopback(cluster.head) if not 20000 <= port <= 20999} == named
    named = {22, *range(6380, 6386)}
    assert {port for port in beyond_loopback(cluster.other) if not 20000 <= port <= 20999} == named


def test_on_the_other_network_no_port_answers(cluster: Cluster) -> None:
    ports = beyond_loopback(cluster.head) - {22}
    assert len(ports) >= 11
    assert not [port for port in ports if cluster.reaches(cluster.head.other_address, port)]
    # Nor at the head's address, where somebody there sends to that by way of the other network.
    route = ["ip", "route", "replace", f"{cluster.head.address}/32", "via", cluster.head.other_address]
    assert cluster.other.run(*route).returncode == 0
    try:
        assert not [port for port in ports if cluster.reaches(cluster.head.address, port)]
    finally:
        cluster.other.run("ip", "route", "del", f"{cluster.head.address}/32")
    assert cluster.reaches(cluster.head.address, PORTS["gcs"]), "so that it was the way that was refused"


def test_without_the_rules_it_would_answer(cluster: Cluster) -> None:
    """So that the test above cannot pass where nothing is refused."""
    rules = cluster.head.run("nft", "list", "ruleset").stdout
    if "shoal_" not in rules:
        pytest.skip("the rules are not nft's here")
    cluster.head.run("nft", "flush", "ruleset")
    try:
        assert cluster.reaches(cluster.head.other_address, PORTS["gcs"])
        assert "NONE" in cluster.head.cluster("status", status=1)
    finally:
        cluster.head.run("nft", "-f", "-", input=rules)
    assert not cluster.reaches(cluster.head.other_address, PORTS["gcs"])


def test_every_grpc_port_refuses_a_caller_without_the_token(cluster: Cluster) -> None:
    driver = cluster.head.command("python", cluster.write("worker.py", _WORKER), environment={"RAY_AUTH_MODE": "token"})
    worker = subprocess.Popen(driver, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert worker.stdin is not None and worker.stdout is not None
    try:
        assert worker.stdout.readline() == b"ready\n"
        of_workers = [port for port in beyond_loopback(cluster.head) if 20000 <= port <= 20999]
        assert of_workers, "a worker listens within the range"
        ports = PORTS | {"worker": of_workers[0]}
        words = ["python", cluster.write("probe.py", _PROBE), cluster.head.address, json.dumps(ports)]
        found = cluster.other.run(*words, input=cluster.token)
        answers = json.loads(found.stdout)
    finally:
        worker.communicate(b"\n", timeout=30)
    assert set(answers) == set(ports)
    for what, (without, wrong, right) in answers.items():
        assert (without, wrong) == ("UNAUTHENTICATED", "UNAUTHENTICATED"), what
        assert right in ("OK", "FAILED_PRECONDITION"), what  # the client's server wants to be greeted first


def test_every_http_port_refuses_a_caller_without_the_token(cluster: Cluster) -> None:
    for what, port in HTTP_PORTS.items():
        for path in ("/api/jobs/", "/api/job_agent/jobs/", "/nodes", "/get_or_create_runtime_env"):
            url = f"http://{cluster.head.address}:{port}{path}"
            assert cluster.http(cluster.other, url) == "401", (what, path)
            assert cluster.http(cluster.other, url, token="0" * 64) in ("401", "403"), (what, path)
    jobs = f"http://{cluster.head.address}:8265/api/jobs/"
    send = ["-X", "POST", "-H", "Content-Type: application/json", "-d", '{"entrypoint": "true"}']
    assert cluster.http(cluster.other, jobs, *send) == "401"
    assert cluster.http(cluster.other, jobs, token=cluster.token) == "200"


def test_metrics_which_ask_for_no_token_answer_the_head_alone(cluster: Cluster) -> None:
    for port in METRICS_PORTS:
        assert cluster.http(cluster.other, f"http://{cluster.head.address}:{port}/metrics") == "000"
        assert cluster.http(cluster.head, f"http://{cluster.head.address}:{port}/metrics") == "200"
    of_other = f"http://{cluster.other.address}:{METRICS_PORTS[0]}/metrics"
    assert cluster.http(cluster.head, of_other) == cluster.http(cluster.other, of_other) == "200"


def test_ray_and_shoal_do_not_get_in_without_the_token(cluster: Cluster) -> None:
    (cluster.other.home / ".ray" / "auth_token").rename(cluster.other.home / "away")
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    try:
        # `ray.init` tries for twenty seconds before it says so, and its client for thirty; the ports tell above.
        listed = cluster.other.run(*_LIST, f"{cluster.head.address}:6379", environment=wrong)
        assert (
            listed.returncode == 1
            and "token is missing or incorrect" in listed.stderr.splitlines()[-1]
            and not listed.stdout
        )
        url = f"http://{cluster.head.address}:8265"
        refused = cluster.other.run("shoal", "submit", "digits", "--address", url)
        assert refused.returncode == 2 and "asks for Ray's token and gets none" in refused.stderr
    finally:
        (cluster.other.home / "away").rename(cluster.other.home / ".ray" / "auth_token")
    entered = cluster.other.run(*_LIST, f"{cluster.head.address}:6379", environment={"RAY_AUTH_MODE": "token"})
    assert entered.stdout.splitlines() == [
        f"{cluster.head.address} alive head",
        f"{cluster.other.address} alive worker",
    ]


def test_the_token_is_in_two_files_that_others_cannot_read_and_nowhere_else(cluster: Cluster) -> None:
    assert re.fullmatch("[0-9a-f]{64}", cluster.token)
    for machine in (cluster.head, cluster.other):
        token = machine.home / ".ray" / "auth_token"
        assert token.read_text() == cluster.token
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        (temp,) = machine.tmp.glob("shoal-ray-*")
        assert stat.S_IMODE(temp.stat().st_mode) == 0o700
        assert not [text for text in machine.processes().values() if cluster.token in text]
        folders = [*machine.tmp.glob("shoal-ray-*"), machine.home / ".ray" / "shoal-cluster"]
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        assert not [path for path in files if cluster.token.encode() in content_of(path)]


def content_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # Ray writes some anew now and then
        return b""


@pytest.mark.slow
def test_iptables_does_the_same_where_there_is_no_nft(cluster: Cluster, tmp_path: Path) -> None:
    head = cluster.head
    if head.run("which", "iptables").returncode:
        pytest.skip("there is no iptables")
    nft = head.run("which", "nft").stdout.strip()
    second = ["--state", f"{tmp_path}/second", "--port", "7379", "--dashboard-port", "8266", "--client-port", "10002"]
    second += ["--worker-ports", "21000-21999", "--interface", "eth0"]
    if nft:
        assert head.run("mount", "--bind", "/bin/false", nft).returncode == 0
    try:
        head.cluster("start-head", *second, *RAY_OPTIONS)
        ports = {8266, 10002, *range(7379, 7388)}
        assert ports < beyond_loopback(head)
        assert not [port for port in ports if cluster.reaches(head.other_address, port)]
        assert cluster.reaches(head.address, 7379) and not cluster.reaches(head.address, 7386)
        head.cluster("cleanup", "--state", f"{tmp_path}/second")
        assert "shoal_" not in head.run("iptables", "-S").stdout + head.run("ip6tables", "-S").stdout
    finally:
        if nft:
            head.run("umount", nft)
    # Two clusters on one machine: the end of one leaves the other alone.
    assert "DOWN" not in head.cluster("status")


def test_who_may_add_no_rules_is_told_so_and_nothing_starts(cluster: Cluster, tmp_path: Path) -> None:
    words = ["start-head", "--state", f"{tmp_path}/third", "--port", "7379", "--interface", "eth0"]
    words += ["--dashboard-port", "8266", "--client-port", "10002", "--venv", str(BINARIES.parent)]
    # Root without the right to change the network.
    without = ["setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin", "--"]
    refused = cluster.head.run(*without, str(SCRIPT), *words)
    if "setpriv" in refused.stderr:
        pytest.skip("there is no setpriv")
    assert refused.returncode == 1
    assert "would be open on eth1 (10.97." in refused.stderr and "--no-firewall" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert 7379 not in cluster.head.listening()
    # Another address of the same interface is another way in too.
    head = cluster.head
    assert head.run("ip", "link", "set", "eth1", "down").returncode == 0
    try:
        for family, address in (("-4", "172.30.0.1/24"), ("-6", "fd00::1/64")):
            assert (
                head.run(
                    "ip", family, "addr", "add", address, "dev", "eth0", "nodad" if family == "-6" else "noprefixroute"
                ).returncode
                == 0
            )
            refused = head.run(*without, str(SCRIPT), *words)
            assert refused.returncode == 1 and f"eth0 ({address.partition('/')[0]})" in refused.stderr
            head.run("ip", family, "addr", "del", address, "dev", "eth0")
    finally:
        head.run("ip", "link", "set", "eth1", "up")
