"""A Ray cluster of three hosts with addresses of their own: a head, and two that train."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.observe.runs import read_events
from tests.launch.hosts import Hosts, NotPermittedError
from tests.launch.watched import RECIPE, STEPS, Run, losses_of

LONG = ["train.steps=2000", "cluster.threads_per_worker=1", "failures.machine_timeout_s=60"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        found = Hosts(3)
    except NotPermittedError as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")
    yield found
    found.close()


def _train(hosts: Hosts, folder: Path, *arguments: str) -> Run:
    """`shoal train` on the head."""
    return Run(
        folder,
        *arguments,
        "--address",
        hosts.cluster,
        environment=dict(hosts.environment),
        before=hosts.command(1),
    )


def _host_of(hosts: Hosts, worker: dict[str, Any]) -> int:
    """The host that a worker runs on."""
    return next(host for host in (2, 3) if hosts.address(host) == worker["address"])


def test_three_hosts_train_as_one_machine_does(hosts: Hosts, undisturbed: dict[str, Any], tmp_path: Path):
    run = _train(hosts, tmp_path / "run", *RECIPE, "--workers", "2")
    workers = run.wait_for_saves(1)
    summary = run.end()
    assert {worker["address"] for worker in workers} == {hosts.address(2), hosts.address(3)}
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]
    assert losses_of(run.folder, STEPS) == undisturbed["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "kill"])
def test_the_run_survives_a_host(hosts: Hosts, undisturbed: dict[str, Any], tmp_path: Path, how: str):
    run = _train(hosts, tmp_path / "run", *RECIPE, *LONG, "--workers", "1:2")
    workers = run.wait_for_saves(3)
    lost = _host_of(hosts, workers[0])  # the one of rank 0, which writes
    when = time.time()
    hosts.cut(lost) if how == "cut" else hosts.kill(lost)
    run.wait_for(lambda events: any(e["event"] == "first_step" and e["time"] > when for e in events))
    assert run.after(when, "first_step") < (25.0 if how == "kill" else 45.0)
    hosts.mend(lost)
    summary = run.end(within_s=200.0)
    sizes = [event["world_size"] for event in read_events(run.folder) if event["event"] == "start"]
    assert sizes[:2] == [2, 1] and summary["status"] == "done"
    difference = zip(losses_of(run.folder, 2000)[:STEPS], undisturbed["losses"], strict=True)
    assert max(abs(one - other) for one, other in difference) < 1e-4
