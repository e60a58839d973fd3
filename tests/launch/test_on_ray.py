"""Runs on a real Ray: the same result as without it, and nothing lost when parts of it are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.drill_cluster import DrillCluster
from shoal.launch.environment import QUIET_RAY
from shoal.launch.on_ray import is_here
from shoal.launch.room import size_of_worker
from shoal.observe.runs import read_events
from shoal.recipe.schema import ClusterSection
from tests.launch.processes import is_alive, wait_until_dead
from tests.launch.watched import RECIPE, STEPS, Run, losses_of
from tests.tiny import own_recipe, write_own_task


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrillCluster]:
    """A head without CPUs and three machines of one CPU each."""
    found = DrillCluster(num_nodes=3, cpus=1, log=tmp_path_factory.mktemp("ray") / "cluster.log")
    yield found
    found.close()


@pytest.fixture
def train(cluster: DrillCluster, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*arguments: str, name: str = "run") -> Run:
        runs.append(Run(tmp_path / name, *arguments, "--address", cluster.address, environment=cluster.environment))
        return runs[-1]

    yield start
    cluster.mend()
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()
        if run.process.stdout is not None:
            run.process.stdout.close()


def test_a_ray_of_its_own_gives_the_weights_of_every_other_launcher(undisturbed: dict[str, Any], tmp_path: Path):
    run = Run(tmp_path / "run", *RECIPE, "--workers", "2")
    workers = run.wait_for_saves(1)
    session = _session(run.process.pid, [worker["pid"] for worker in workers])
    beyond = _listening_beyond_loopback(session)
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in session if is_alive(pid)]
    summary = run.end()
    ended = time.time()
    assert not beyond, f"listens for others than this machine: {beyond}"
    idle = ("log_monitor.py", "autoscaler/_private/monitor.py", "dashboard/dashboard.py")
    assert not [command for command in commands if any(name in command for name in idle)], "take from the training"
    (done,) = [event for event in read_events(run.folder) if event["event"] == "done"]
    assert ended - done["time"] < 4.0, "Ray is not waited for"
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]
    assert summary["world_size"] == 2 and summary["restarts"] == 0
    assert losses_of(run.folder) == undisturbed["losses"]
    wait_until_dead(*session)
    told = run.log.read_text().replace("starting Ray\n", "")
    assert "[rank" not in told and "ray" not in told.lower(), "chatter"


@pytest.mark.slow
def test_what_is_set_for_a_ray_of_its_own_does_not_reach_the_workers(here: Path):
    write_own_task(here, "own_task", "import os; step == 1 and print('has', sorted(os.environ))")
    (here / "own.yaml").write_text(json.dumps(own_recipe("own_task") | {"train": {"steps": 2, "global_batch": 8}}))
    run = Run(here / "run", "own.yaml", "--workers", "2", environment={"REPORTER_UPDATE_INTERVAL_MS": "7"})
    run.end()
    told = [line for line in run.log.read_text().splitlines() if "] has " in line]
    assert len(told) == 2 and all("'PATH'" in line for line in told)
    assert not [name for line in told for name in QUIET_RAY.keys() - {"REPORTER_UPDATE_INTERVAL_MS"} if name in line]
    assert all("REPORTER_UPDATE_INTERVAL_MS" in line for line in told), "the user's own stays"


@pytest.mark.slow
def test_two_runs_on_a_cluster_are_the_same(train: Callable[..., Run], undisturbed: dict[str, Any]):
    assert train(*RECIPE, "--workers", "2").end()["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_costs_seconds_and_nothing_else(
    train: Callable[..., Run], undisturbed: dict[str, Any], rank: int
):
    run = train(*RECIPE, "--workers", "2")
    workers = run.wait_for_saves(3)
    when = time.time()
    os.kill(workers[rank]["pid"], signal.SIGKILL)
    summary = run.end()
    assert run.after(when, "failure") < 3.0
    assert summary["restarts"] == 1 and summary["weights_sha256"] == undisturbed["weights_sha256"]
    assert losses_of(run.folder) == undisturbed["losses"]


@pytest.mark.slow
def test_an_agent_that_is_killed_takes_its_worker_along_and_is_replaced(
    train: Callable[..., Run], undisturbed: dict[str, Any]
):
    run = train(*RECIPE, "--workers", "2")
    workers = run.wait_for_saves(3)
    when = time.time()
    os.kill(workers[1]["agent_pid"], signal.SIGKILL)
    summary = run.end()
    assert not is_alive(workers[1]["pid"])
    assert run.after(when, "failure") < 3.0
    assert summary["restarts"] == 1 and summary["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.slow
def test_a_machine_that_is_lost_is_replaced(
    train: Callable[..., Run], cluster: DrillCluster, undisturbed: dict[str, Any]
):
    run = train(*RECIPE, "--workers", "2")
    workers = run.wait_for_saves(3)
    cluster.kill(workers[1]["node"])
    summary = run.end()
    assert summary["restarts"] == 1 and summary["weights_sha256"] == undisturbed["weights_sha256"]
    assert losses_of(run.folder) == undisturbed["losses"]


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_a_run_to_resume(
    train: Callable[..., Run], cluster: DrillCluster, undisturbed: dict[str, Any]
):
    run = train(*RECIPE, "--workers", "2")
    workers = run.wait_for_saves(4)
    os.kill(run.process.pid, signal.SIGKILL)
    wait_until_dead(*(worker["pid"] for worker in workers), within_s=20.0)
    resumed = Run(
        run.folder, "--resume", str(run.folder), "--address", cluster.address, environment=cluster.environment
    )
    summary = resumed.end()
    assert summary["resumed_from_step"] >= 60 and summary["weights_sha256"] == undisturbed["weights_sha256"]
    assert losses_of(run.folder) == undisturbed["losses"]


@pytest.mark.slow
def test_elastic_goes_on_with_fewer_and_grows_again(
    train: Callable[..., Run], cluster: DrillCluster, undisturbed: dict[str, Any]
):
    run = train(*RECIPE, "train.steps=8000", "--workers", "1:2")
    workers = run.wait_for_saves(3)
    spare = next(node for node in cluster.nodes() if node not in {worker["node"] for worker in workers})
    cluster.kill(spare)
    when = time.time()
    cluster.kill(workers[1]["node"])
    run.wait_for(lambda events: any(e["event"] == "first_step" and e["time"] > when for e in events))
    assert run.after(when, "first_step") < 25.0
    cluster.mend()
    summary = run.end(within_s=200.0)
    events = read_events(run.folder)
    assert [event["world_size"] for event in events if event["event"] == "start"] == [2, 1, 2]
    assert [(event["from"], event["to"]) for event in events if event["event"] == "resize"] == [(2, 1), (1, 2)]
    assert summary["world_size"] == 2
    difference = zip(losses_of(run.folder, 8000)[:STEPS], undisturbed["losses"], strict=True)
    assert max(abs(one - other) for one, other in difference) < 1e-4


def test_a_machine_that_announces_its_end_costs_no_step(
    train: Callable[..., Run], cluster: DrillCluster, undisturbed: dict[str, Any]
):
    run = train(*RECIPE, "checkpoint.every_steps=1000", "--workers", "2")
    workers = run.wait_for(lambda events: any(event["event"] == "first_step" for event in events))[-2]["workers"]
    time.sleep(0.5)
    cluster.preempt(workers[1]["node"], 30.0)
    summary = run.end()
    events = read_events(run.folder)
    stopped = next(event["step"] for event in events if event["event"] == "interrupted")
    assert next(event["step"] for event in events if event["event"] == "resume") == stopped, "a step was lost"
    assert summary["restarts"] == 0 and summary["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.slow
def test_a_hung_worker_is_diagnosed_and_replaced(train: Callable[..., Run], undisturbed: dict[str, Any]):
    run = train(*RECIPE, "failures.hang_timeout_s=3", "--workers", "2")
    workers = run.wait_for_saves(3)
    os.kill(workers[1]["pid"], signal.SIGSTOP)
    summary = run.end()
    hang = next(event for event in read_events(run.folder) if event["event"] == "hang")
    assert set(hang["stacks"]) == {"0", "1"} and "stopped" in hang["stacks"]["1"] and "File" in hang["stacks"]["0"]
    assert summary["restarts"] == 1 and summary["weights_sha256"] == undisturbed["weights_sha256"]


def test_more_than_the_cluster_has_is_refused_at_once(train: Callable[..., Run]):
    began = time.monotonic()
    run = train(*RECIPE, "--workers", "4")
    run.end(status=2)
    message = run.log.read_text()
    assert "4 workers need 4 CPU and the cluster has 3" in message and "--wait" in message
    assert time.monotonic() - began < 20 and not run.folder.exists()


@pytest.mark.parametrize(("workers", "fits"), [("4", False), pytest.param("3:8", True, marks=pytest.mark.slow)])
def test_a_plan_says_whether_the_cluster_has_room(cluster: DrillCluster, workers: str, fits: bool, tmp_path: Path):
    command = [sys.executable, "-m", "shoal.cli.main", "plan", "digits", "train.global_batch=120", "--json"]
    words = ["--workers", workers, "--address", cluster.address]
    found = subprocess.run(
        [*command, *words],
        env=os.environ | cluster.environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    room = json.loads(found.stdout)["cluster"]
    assert room["fits"] is fits and room["machines"] == room["workers_at_most"] == 3 and room["workers_now"] <= 3
    told = "has room" if fits else "4 workers need 4 CPU and the cluster has 3"
    assert f"{told}; 3 workers of 1 CPU fit on 3 of its machines" in found.stderr
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize(
    ("gpus", "least", "there", "expected"),
    [(None, 2, 2, 1), (None, 2, 1, 0), (None, 2, 0, 0), (0, 2, 8, 0), (1, 2, 0, 1), (None, 3, 3, 1), (0.5, 2, 1, 0.5)],
)
def test_a_worker_is_planned_with_a_gpu_where_a_run_would_ask_for_one(
    gpus: float | None, least: int, there: int, expected: float
):
    cluster = ClusterSection(workers=4, min_workers=least, gpus_per_worker=gpus, cpus_per_worker=2)
    nodes = [{"CPU": 8.0}, *[{"CPU": 8.0, "GPU": 1.0}] * there]
    assert size_of_worker(cluster, nodes) == {"CPU": 2.0} | ({"GPU": float(expected)} if expected else {})


@pytest.mark.slow
def test_what_is_waited_for_is_told(train: Callable[..., Run]):
    run = train(*RECIPE, "--workers", "4", "--wait", "5")
    run.end(status=1)
    message = run.log.read_text()
    assert (
        "waiting for 4 more workers of 1 CPU each; the cluster has 3 CPU free" in message
        and "s left" in message
        and "given up" in message
    )


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:6379", True),
        ("ray://localhost:10001", True),
        ("192.0.2.1:6379", False),
        ("no.such.host.invalid:6379", False),
        ("6379", False),
    ],
)
def test_this_machines_own_addresses_are_known(address: str, expected: bool):
    assert is_here(address) is expected


def test_no_cluster_is_told_with_a_remedy(tmp_path: Path):
    run = Run(tmp_path / "run", "digits", "--address", "127.0.0.1:1")
    run.end(status=2)
    assert "no Ray cluster answers at '127.0.0.1:1'" in run.log.read_text() and "ray start" in run.log.read_text()


def _session(pid: int, workers: list[int]) -> set[int]:
    """The process, all that it has started, and the workers, which have left their parents."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid, *workers, *(parents.get(worker, 0) for worker in workers)}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {0, 1}


def _listening_beyond_loopback(pids: set[int]) -> list[str]:
    """Addresses that these processes listen at and that other machines could reach."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(str(descriptor.readlink()))
            except OSError:
                continue
    beyond = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            address, state, inode = fields[1], fields[3], fields[9]
            is_loopback = address.startswith(
                ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
            )
            if state == "0A" and f"socket:[{inode}]" in sockets and not is_loopback:
                beyond.append(address)
    return beyond
