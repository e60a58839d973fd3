"""`cluster.sh` when something goes wrong in the middle: what was begun is taken back, or is known and can be."""

import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.deploy.machines import BINARIES, RAY_OPTIONS, SCRIPT, Machine, Network
from tests.deploy.test_cluster_script import files_of, table

HEAD = ["start-head", "--interface", "eth0"]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    found = Network(3)
    yield found
    found.close()


@pytest.fixture
def machines(network: Network) -> Iterator[list[Machine]]:
    """Machines on which nothing is, before and after."""
    before = [files_of(machine) for machine in network.machines]
    yield network.machines
    for machine, files in zip(network.machines, before, strict=True):
        assert machine.processes() == {}
        assert files_of(machine) ^ files == set()
        assert "shoal" not in machine.run("nft", "list", "ruleset").stdout + machine.run("iptables", "-S").stdout


def begun(machine: Machine, *words: str) -> "subprocess.Popen[str]":
    """The script as a terminal runs it: with a group of its own."""
    command = machine.command("setsid", "--wait", str(SCRIPT), *words)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def press_ctrl_c(machine: Machine, process: "subprocess.Popen[str]") -> str:
    """It reaches all processes of the script."""
    rows = [line.split(maxsplit=2) for line in machine.run("ps", "-eo", "pid=,pgid=,args=").stdout.splitlines()]
    (group,) = {pgid for pid, pgid, text in rows if pid == pgid and text.startswith("bash") and SCRIPT.name in text}
    assert machine.run("kill", "-INT", "--", f"-{group}").returncode == 0
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stdout + stderr
    return stdout + stderr


def wait_for(machine: Machine, program: str) -> None:
    deadline = time.monotonic() + 30
    while not any(program in text for text in machine.processes().values()):
        assert time.monotonic() < deadline, f"{program} does not start on {machine.name}"
        time.sleep(0.05)


def test_a_start_that_fails_leaves_nothing(machines: list[Machine]) -> None:
    head = machines[0]
    said = head.cluster(*HEAD, "--", "--bogus", status=1)
    assert "Ray does not start on" in said and "No such option" in said
    log = head.home / ".ray" / "shoal-cluster" / "start.log"
    assert str(log.relative_to(head.home)) in said and "--bogus" in log.read_text()
    log.unlink()
    assert "nothing answers at 127.0.0.1:6" in head.cluster(*HEAD, "--redis", "127.0.0.1:6", status=1)
    assert "there is no cluster" in head.cluster("status", status=2)


@pytest.mark.slow
def test_a_restart_that_fails_leaves_the_cluster_known(machines: list[Machine]) -> None:
    """After a reboot, say, that has emptied /tmp."""
    head = machines[0]
    settings = head.home / ".ray" / "shoal-cluster" / "settings"
    head.cluster(*HEAD, *RAY_OPTIONS)
    known = settings.read_text()
    head.cluster("stop")
    (folder,) = head.tmp.glob("shoal-ray-*")
    shutil.rmtree(folder)
    assert "--bogus" in head.cluster(*HEAD, "--", "--bogus", status=1)
    assert set(settings.read_text().splitlines()) == set(known.splitlines())
    head.cluster("cleanup", "--token")


def test_ctrl_c_during_a_start_leaves_nothing(machines: list[Machine]) -> None:
    head = machines[0]
    start = begun(head, *HEAD, *RAY_OPTIONS)
    wait_for(head, "gcs_server")
    assert "interrupted" in press_ctrl_c(head, start)
    (head.home / ".ray" / "shoal-cluster" / "start.log").unlink(missing_ok=True)
    assert "there is no cluster" in head.cluster("status", status=2)


@pytest.mark.slow
def test_of_two_starts_at_once_one_is_refused(machines: list[Machine]) -> None:
    head = machines[0]
    both = [begun(head, *HEAD, *RAY_OPTIONS) for _ in range(2)]
    said = ["".join(one.communicate(timeout=90)) for one in both]
    assert sorted(one.returncode for one in both) == [0, 1], said
    assert "another cluster.sh is at work" in said[both[0].returncode == 0]
    assert table(head.cluster("status"))["head"] == "running"
    head.cluster("cleanup", "--token")


@pytest.mark.slow
def test_joins_that_fail_or_are_cut_off(network: Network, machines: list[Machine]) -> None:
    head, first, second = machines
    (head.network.shared / "env").symlink_to(BINARIES.parent)
    head.cluster(*HEAD, "--venv", "env", *RAY_OPTIONS)  # from the folder that this is in
    said = table(head.cluster("join", first.address, "--", "--bogus", status=1))
    assert "FAILED: error: Ray does not start" in said[first.address] and "--bogus" in said[first.address]
    assert first.processes() == {} and not (first.home / ".ray" / "auth_token").exists()
    assert first.address not in table(head.cluster("status"))

    joining = begun(head, "join", first.address, *RAY_OPTIONS)
    wait_for(first, "raylet")
    assert f"{first.address} may go on with it" in press_ctrl_c(head, joining)
    assert "UNKNOWN: join was cut off" in table(head.cluster("status", status=1))[first.address]
    # What goes on there ends some time; only then may somebody else change the cluster.
    deaf = ["--ssh", "ssh -o BatchMode=yes -p 1"]
    deadline = time.monotonic() + 60
    while "another cluster.sh is at work" in (said := head.run(str(SCRIPT), "leave", first.address, *deaf).stderr):
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
    assert first.address in table(head.cluster("status", status=1))  # it was not reached
    head.cluster("leave", first.address)
    assert first.processes() == {} and first.address not in table(head.cluster("status"))

    # Names that are alike as patterns are not as names.
    (head.home / ".ssh" / "config").open("a").write(
        f"Host gpu-1\n  HostName {first.address}\nHost gpu.1\n  HostName {second.address}\n"
    )
    head.cluster("join", "gpu-1", *RAY_OPTIONS)
    head.cluster("join", "gpu.1", *RAY_OPTIONS)
    assert {"gpu-1", "gpu.1"} <= table(head.cluster("status")).keys()

    # A machine that says nothing any more is named, and the rest is done.
    mute = head.network.shared / "mute"
    mute.write_text('#!/bin/sh\ncase "$*" in *gpu-1*) exec sleep 1000 ;; esac\nexec ssh "$@"\n')
    mute.chmod(0o755)
    said = head.cluster("cleanup", "--token", "--ssh", str(mute), status=1, environment={"SHOAL_SSH_S": "15"})
    assert "no answer for 15 s" in table(said)["gpu-1"] and "gpu-1: not cleaned up" in said
    assert second.processes() == {} and not any("gcs_server" in text for text in head.processes().values())
    head.cluster("cleanup", "--token")


@pytest.mark.slow
def test_a_token_is_replaced_where_it_was_made_here(machines: list[Machine]) -> None:
    head, other = machines[:2]
    file = head.home / ".ray" / "auth_token"

    def start() -> str:
        head.cluster(*HEAD, *RAY_OPTIONS)
        head.cluster("join", other.address, *RAY_OPTIONS)
        return file.read_text()

    first = start()
    head.cluster("cleanup")
    assert start() == first  # kept
    others = ["--state", "/tmp/others", "--port", "7379", "--dashboard-port", "8266", "--client-port", "10002"]
    head.cluster(*HEAD, *others, "--worker-ports", "21000-21999", *RAY_OPTIONS)
    assert "auth_token was there before, and stays" in head.cluster("cleanup", "--token", "--state", "/tmp/others")
    assert file.read_text() == first  # it is the first cluster's
    head.cluster("cleanup", "--token")
    assert not file.exists() and not (other.home / ".ray" / "auth_token").exists()
