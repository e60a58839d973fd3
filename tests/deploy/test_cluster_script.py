"""`cluster.sh`: wrong input, and the life of a cluster from its start to its cleanup."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.observe.runs import read_events
from tests.deploy.machines import BINARIES, RAY_OPTIONS, REPOSITORY, SCRIPT, Machine, Network

STEPS = 2500
RECIPE = [
    "synthetic_mlp",
    f"train.steps={STEPS}",
    "train.global_batch=48",
    "model.hidden=[64]",
    "data.samples=3000",
    "data.val_samples=300",
    "checkpoint.every_steps=50",
    "cluster.gpus_per_worker=0",
    "cluster.threads_per_worker=1",
]


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{BINARIES}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("there is no shellcheck")
    found = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def say(home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """What the script says to a user with an empty home."""
    environment = {"PATH": f"{BINARIES}:{os.environ['PATH']}", "HOME": str(home)}
    return subprocess.run([str(SCRIPT), *words], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "VERB: is missing"),
        (["begin"], "'begin' should be start-head, join, leave, status, stop or cleanup"),
        (["start-head", "--prot", "1"], "--prot: no such option"),
        (["start-head", "--port"], "--port: what it should be is missing"),
        (["start-head", "--port", "6379x"], "--port: '6379x' should be a whole number from 1024 to 65527"),
        (["start-head", "--port", "80"], "--port: '80' should be a whole number from 1024"),
        (["start-head", "--port", "08000"], "--port: '08000'"),
        (["start-head", "--port", "8260"], "--port: 8260 to 8268 are taken, so 8265 cannot be another's"),
        (["start-head", "--client-port", "8265"], "--client-port: 8265 is the dashboard's"),
        (["start-head", "--worker-ports", "3000-2000"], "--worker-ports: '3000-2000' should be two ports"),
        (["start-head", "--num-cpus", "-1"], "--num-cpus: '-1'"),
        (["start-head", "--address", "127.0.0.1"], "--address: '127.0.0.1' is no address of this machine that others"),
        (["start-head", "--interface", "eth77"], "--interface: 'eth77' is no interface here"),
        (["start-head", "--interface", "a", "--address", "b"], "--interface: say either this or --address"),
        (["start-head", "--redis", "redis"], "--redis: 'redis' should be HOST:PORT"),
        (["start-head", "--redis-password-file", "/none"], "--redis-password-file: '/none' cannot be read"),
        (["start-head", "--temp-dir", "here"], "--temp-dir: 'here' should be a full path"),
        (["start-head", "host"], "start-head: takes no HOST, and was given 'host'"),
        (["join", "-x"], "HOST: '-x' is no name of a machine"),
        (["join", "a;b"], "HOST: 'a;b' is no name of a machine"),
        (["join", "--hosts-file", "/none"], "--hosts-file: '/none' cannot be read"),
        (["join", "--hosts-file", "/tmp"], "--hosts-file: '/tmp' cannot be read"),
        (["join", "--user", "-oProxyCommand=x"], "--user: '-oProxyCommand=x' is no name of a user"),
        (["start-head", "--bogus"], "--bogus: no such option"),
        (["join", "host"], "cluster.sh start-head"),
        (["leave", "host"], "there is no cluster in"),
        (["status"], "there is no cluster in"),
        (["cleanup"], "there is no cluster in"),
    ],
)
def test_wrong_input_is_one_line_that_names_it_and_leaves_nothing(tmp_path: Path, words: list[str], told: str) -> None:
    found = say(tmp_path, *words)
    assert found.returncode == 2 and not found.stdout
    assert found.stderr.startswith("error: ") and found.stderr.count("\n") == 1
    assert told in found.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["-oProxyCommand=touch${IFS}x", "../../etc/x", "a;b"])
def test_names_in_a_file_are_checked_as_others(tmp_path: Path, name: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"good\r\n{name}\r\n")
    found = say(tmp_path, "join", "--hosts-file", str(file))
    assert found.returncode == 2 and found.stderr == f"error: HOST: '{name}' is no name of a machine\n"


def test_services_may_have_no_home(tmp_path: Path) -> None:
    environment = {"PATH": f"{BINARIES}:{os.environ['PATH']}"}
    words = [str(SCRIPT), "status", "--state", str(tmp_path / "none")]
    found = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 2 and "there is no cluster in" in found.stderr


def test_a_state_that_is_damaged_stops_nobody(tmp_path: Path) -> None:
    state = tmp_path / ".ray" / "shoal-cluster"
    state.mkdir(parents=True)
    (state / "settings").write_text("address 10.0.0.1\nport 6379\n")
    for verb in ("cleanup", "stop", "status", "_leave", "_stop"):
        found = say(tmp_path, verb)
        assert found.returncode == 1 and "is damaged: it names no cluster" in found.stderr, verb


def test_help_shows_every_verb_with_examples(tmp_path: Path) -> None:
    found = say(tmp_path, "--help")
    assert found.returncode == 0 and found.stdout.startswith("Usage: ")
    for verb in ("start-head", "join", "leave", "status", "stop", "cleanup", "Examples"):
        assert verb in found.stdout
    assert say(tmp_path, "join", "--help").stdout == found.stdout


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    found = Network(3)
    yield found
    found.close()


def submit(head: Machine, folder: Path, *words: str) -> "subprocess.Popen[str]":
    """`shoal submit` on the head, followed to its end."""
    address = f"http://{head.address}:8265"
    command = ["shoal", "submit", *RECIPE, *words, "--run-dir", str(folder), "--address", address, "--json"]
    return subprocess.Popen(head.command(*command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_saves(job: "subprocess.Popen[str]", folder: Path, count: int) -> list[dict[str, Any]]:
    """What has happened to a run when it has saved so often."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        events = read_events(folder) if folder.is_dir() else []
        if sum(event["event"] == "save" for event in events) >= count:
            return events
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)
    job.kill()
    raise AssertionError(f"no {count} saves: {job.communicate()}")


def table(said: str) -> dict[str, str]:
    """The lines of a table, by the machine."""
    rows = [line.split(maxsplit=2) for line in said.splitlines()]
    return {row[0]: row[2] for row in rows if len(row) == 3 and row[0] != "host"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cluster_trains_loses_a_machine_and_leaves_nothing(network: Network) -> None:
    head, first, second = network.machines
    undisturbed = head.run("shoal", "train", *RECIPE, "--workers", "2", "--launcher", "local", "--json")
    before = {machine.name: files_of(machine) for machine in network.machines}
    # Of another cluster, as far as anybody can see by its name.
    stranger = subprocess.Popen(head.command("bash", "-c", "exec -a /opt/ray/raylet/raylet sleep 1000"))
    missing = head.cluster("start-head", *RAY_OPTIONS, status=2)
    assert "--address: is missing" in missing and head.address in missing and head.other_address in missing
    said = head.cluster("start-head", "--address", head.address, *RAY_OPTIONS)
    assert f"http://{head.address}:8265" in said and "firewall: reached by" in said
    assert "the head runs" in head.cluster("start-head", "--address", head.address, status=1)
    check_joining(head, first, second)

    folder = network.shared / "run"
    job = submit(head, folder, "--workers", "2")
    events = wait_for_saves(job, folder, 3)
    workers = next(event["workers"] for event in events if event["event"] == "workers")
    lost = first if workers[0]["host"] == first.name else second
    lost.power_off()
    assert not any(event["event"] == "done" for event in read_events(folder)), "too fast for this test"
    stdout, stderr = job.communicate(timeout=120)
    assert job.returncode == 0, stderr
    summary = json.loads(stdout.splitlines()[-1])["summary"]
    assert summary["status"] == "done" and summary["step"] == STEPS and summary["restarts"] >= 1
    assert summary["weights_sha256"] == json.loads(undisturbed.stdout.splitlines()[-1])["weights_sha256"]

    said = head.cluster("status", status=1)
    assert table(said)[lost.address] == "DOWN" and table(said)["head"] == "running"
    said = head.cluster("cleanup", "--grace", "20", "--token", status=1)
    assert "FAILED" in table(said)[lost.address] and f"{lost.address}: not cleaned up" in said
    lost.boot()
    head.cluster("cleanup", "--token")
    left = [pid for pid, text in head.processes().items() if text == "/opt/ray/raylet/raylet 1000"]
    assert len(left) == 1, "what others have started goes on"
    head.run("kill", *map(str, left))
    stranger.wait()
    for machine in network.machines:
        assert machine.processes() == {}
        assert files_of(machine) ^ before[machine.name] == set()
        assert "shoal" not in machine.run("nft", "list", "ruleset").stdout + machine.run("iptables", "-S").stdout


def files_of(machine: Machine) -> set[str]:
    """What lies in its /tmp and home."""
    kept = (str(machine.network.folder), str(REPOSITORY))
    found = machine.run("find", "/tmp", machine.run("sh", "-c", "echo ~").stdout.strip(), "-type", "f").stdout.split()
    return {file for file in found if not file.startswith((*kept, "/root/.pyenv", "/root/.cache"))}


def check_joining(head: Machine, first: Machine, second: Machine) -> None:
    """Those that cannot join are told one by one, and the others join."""
    other = head.network.shared / "other"
    (other / "bin").mkdir(parents=True)
    (other / "bin" / "python").write_text("#!/bin/sh\nprintf 'Python 3.9.1, ray 2.9.0, no shoal'\n")
    (other / "bin" / "ray").write_text("#!/bin/sh\nexit 1\n")
    for file in (other / "bin").iterdir():
        file.chmod(0o755)
    said = table(head.cluster("join", "--venv", str(other), first.address, status=1))
    assert "has Python 3.9.1, ray 2.9.0, no shoal, and the head Python 3" in said[first.address]
    token = second.home / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("another")
    nobody = f"{head.address.rpartition('.')[0]}.99"
    options = ["--hosts-file", hosts_file(head, second.address, nobody), "--ssh", "ssh -o ConnectTimeout=2"]
    said = table(head.cluster("join", first.address, *options, *RAY_OPTIONS, "--num-cpus", "2", status=1))
    assert said[first.address] == "joined"
    assert "has the token of another cluster" in said[second.address] and "FAILED" in said[nobody]
    token.unlink()
    said = table(head.cluster("join", first.address, second.address, *RAY_OPTIONS, "--num-cpus", "2"))
    assert said == {first.address: "had joined before", second.address: "joined"}
    said = table(head.cluster("status"))
    assert said["head"] == said[first.address] == said[second.address] == "running"


def hosts_file(head: Machine, *hosts: str) -> str:
    file = head.network.shared / "hosts"
    file.write_text("# those that shall join\n\n" + "\n".join(hosts) + "\n")
    return str(file)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_machine_that_leaves_is_left_with_a_checkpoint(network: Network) -> None:
    head, first, second = network.machines
    head.cluster("start-head", "--interface", "eth0", *RAY_OPTIONS)
    try:
        head.cluster("join", first.address, second.address, *RAY_OPTIONS, "--num-cpus", "1")
        folder = network.shared / "leaving"
        job = submit(head, folder, "train.steps=6000", "--workers", "1:2")
        wait_for_saves(job, folder, 2)
        said = head.cluster("leave", second.address)
        assert "still busy" not in said and table(said)[second.address].startswith("stopped")
        assert second.processes() == {} and second.address not in head.cluster("status")
        _, stderr = job.communicate(timeout=150)
        assert job.returncode == 0, stderr
        events = read_events(folder)
        assert any(event["event"] == "preemption" for event in events)
        assert not any(event["event"] in ("failure", "forgotten") for event in events), "no step was made twice"

        # And the end of all: the job saves, and is told to the one who follows it.
        folder = network.shared / "stopping"
        job = submit(head, folder, "train.steps=100000", "--workers", "1")
        wait_for_saves(job, folder, 1)
        said = head.cluster("stop")
        assert "is asked to save and end" in said and "has not ended" not in said
        job.kill()
        job.communicate()
        ended = [event for event in read_events(folder) if event["event"] == "interrupted"]
        assert ended, [event["event"] for event in read_events(folder)][-5:]
        for machine in network.machines:
            assert machine.processes() == {}
    finally:
        head.cluster("cleanup", "--force", "--token")
    assert not [folder for machine in network.machines for folder in machine.tmp.glob("shoal-ray-*")]
