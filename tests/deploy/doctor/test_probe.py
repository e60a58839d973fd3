"""What the doctor does on a machine, here without a cluster: two of them on loopback."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.deploy.doctor import reduce_rank
from shoal.deploy.doctor.devices import Devices
from shoal.deploy.doctor.finding import Finding
from shoal.deploy.doctor.probe import Probe, versions
from tests.launch.processes import is_alive


@pytest.fixture
def probes() -> Iterator[tuple[Probe, Probe]]:
    found = (Probe("127.0.0.1"), Probe("127.0.0.1"))
    yield found
    for probe in found:
        probe.close()


def follow(probes: tuple[Probe, Probe], stages: set[str], within_s: float = 60.0) -> dict[int, dict[str, Any]]:
    until = time.monotonic() + within_s
    while True:
        states = probes[0].ranks() | probes[1].ranks()
        if all(state["stage"] in stages or "error" in state for state in states.values()):
            return states
        assert time.monotonic() < until, states
        time.sleep(0.05)


def job(rank: int, port: int, **more: Any) -> dict[str, Any]:
    job = {"rank": rank, "world_size": 2, "backend": "gloo", "gpu": 0, "host": "127.0.0.1", "port": port}
    return job | {"timeout_s": 30.0} | more


def test_it_looks_at_its_machine(probes: tuple[Probe, Probe]) -> None:
    told = probes[0].look()
    findings = [Finding(**record) for record in told["findings"]]
    assert "shm" in {finding.check for finding in findings}
    assert set(told["versions"]) >= {"Python", "Shoal", "torch", "Ray"} and told["gpus"] >= 0
    assert abs(probes[0].now() - time.time()) < 1 and probes[0].pid() == os.getpid()
    assert versions(Devices(nccl="2.27", driver="550"))["NCCL"] == "2.27"


def test_it_measures_the_way_to_another(probes: tuple[Probe, Probe]) -> None:
    port, key = probes[1].listen()
    assert "error" not in probes[0].measure("127.0.0.1", port, key)
    probes[1].stop_listening()
    assert "error" in probes[0].measure("127.0.0.1", port, key)


def test_it_writes_reads_locks_and_leaves_nothing(probes: tuple[Probe, Probe], tmp_path: Path) -> None:
    folder = str(tmp_path)
    sha256 = probes[0].write(folder, "key", 0)["sha256"]
    assert probes[1].read(folder, "key", {0: sha256})["wrong"] == {}
    assert [probe.lock(folder, "key") for probe in probes] == ["taken", "held"]
    for number, probe in enumerate(probes):
        probe.remove(folder, "key", number)
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_sum(probes: tuple[Probe, Probe]) -> None:
    port = probes[0].open_meeting()
    probes[0].start_ranks([job(0, port)])
    probes[1].start_ranks([job(1, port)])
    states = follow(probes, {"done"})
    assert [states[rank].get("error") for rank in (0, 1)] == [None, None]
    assert all(
        state["s"] > 0 and state["bytes"] in (4 * reduce_rank.SMALL, 4 * reduce_rank.LARGE) for state in states.values()
    )


def test_a_rank_that_cannot_reach_the_first_says_so_and_the_other_is_ended(probes: tuple[Probe, Probe]) -> None:
    port = probes[0].open_meeting()
    probes[0].start_ranks([job(0, port)])
    probes[1].start_ranks([job(1, 1)])  # nobody listens there
    states = follow(probes, {"reached", "joined"})
    assert states[1]["stage"] == "ready" and "Connection refused" in states[1]["error"]
    assert states[0]["stage"] == "reached" and "error" not in states[0]
    pid = probes[0]._ranks[0]._process.pid
    probes[0].end_ranks()
    assert not is_alive(pid) and probes[0].ranks() == {}


def test_a_rank_that_is_killed_is_told(probes: tuple[Probe, Probe]) -> None:
    probes[0].start_ranks([job(0, 1)])
    process = probes[0]._ranks[0]._process
    process.kill()
    process.wait()
    state = probes[0].ranks()[0]
    assert state["stage"] == "started" and "status -9" in state["error"]


def test_a_rank_ends_with_who_started_it(probes: tuple[Probe, Probe]) -> None:
    port = probes[0].open_meeting()
    probes[0].start_ranks([job(0, port)])
    process = probes[0]._ranks[0]._process
    assert process.stdin is not None
    process.stdin.close()  # as when the actor is killed
    assert process.wait(timeout=30) == 1


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist

    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(3).index_fill_(0, torch.tensor([5]), 0.0))
    with pytest.raises(ValueError, match=r"the sum is wrong in 1 of 1000 numbers"):
        reduce_rank._reduce(1000, {"rank": 0, "world_size": 2}, torch.device("cpu"))


def test_sums_are_exact_however_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist

    size = 4000
    others = sum(map(reduce_rank._factor, range(1, size)))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(torch.arange(300.0) % 251 * others))
    assert reduce_rank._reduce(300, {"rank": 0, "world_size": size}, torch.device("cpu"))["s"] >= 0
    assert 250 * (others + 1) < 2**24
