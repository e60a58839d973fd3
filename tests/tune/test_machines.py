"""Searches on a cluster of several machines, some of which are lost. Real nodes, real kills."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.drill_cluster import DrillCluster
from tests.tune.searching import journal, start, summary_of, what_came_of, worker_pids, write_slow


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DrillCluster]:
    found = DrillCluster(*request.param, tmp_path / "cluster.log")
    yield found
    found.close()


def sizes(folder: Path) -> list[tuple[float, int]]:
    """When workers of any trial were started, and how many."""
    found = []
    for path in (folder / "trials").glob("*/events.jsonl"):
        events = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        found += [(event["time"], event["world_size"]) for event in events if event["event"] == "start"]
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [(4, 2)], indirect=True)
def test_a_population_of_elastic_trials_goes_on_with_half_of_the_machines(here: Path, cluster: DrillCluster):
    write_slow(here, steps=180)
    process = start(
        *("slow.yaml", "space.yaml", "--trials", "4", "--scheduler", "pbt", "--workers", "1:2", "--json"),
        *("tune.interval=30", "--search-dir", "s", "--address", cluster.address),
        folder=here,
        environment=cluster.environment,
    )
    # A machine that is slow to start processes has trials of one worker first.
    while not any(size == 2 for _, size in sizes(here / "s")):
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.1)
    for node in cluster.nodes()[:2]:
        cluster.kill(node)
    lost = time.time()
    summary = summary_of(process)
    assert summary["trials_by_status"] == {"done": 4}
    after = [size for when, size in sizes(here / "s") if when > lost]
    assert after, "trials went on"
    assert min(after) == 1, "and without the half of them, some have one"


_HOLDS = """
import ray, sys, time

@ray.remote(num_cpus=2)
class Other:
    def is_there(self):
        return "holds"

ray.init(sys.argv[1], log_to_driver=False)
other = Other.remote()
print(ray.get(other.is_there.remote()), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [(2, 2)], indirect=True)
def test_where_others_use_half_of_the_cluster_a_search_does_with_the_rest(here: Path, cluster: DrillCluster):
    """It asks for more places than it can have; whoever waits for one has it when another comes free, not later."""
    write_slow(here, steps=60)
    environment = dict(os.environ) | cluster.environment
    words = [sys.executable, "-c", _HOLDS, cluster.address]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "holds\n"
        process = start(
            *("slow.yaml", "space.yaml", "--trials", "4", "--scheduler", "pbt", "--json"),
            *("tune.interval=20", "--search-dir", "s", "--address", cluster.address),
            folder=here,
            environment=cluster.environment,
        )
        summary = summary_of(process)
        other.kill()
    assert summary["trials_by_status"] == {"done": 4}
    times = [event["time"] for event in journal(here / "s")]
    assert max(after - before for before, after in itertools.pairwise(times)) < 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheduler", ["none", "hyperband", "pbt"])
@pytest.mark.parametrize("cluster", [(3, 2)], indirect=True)
def test_a_search_bears_whatever_is_killed(here: Path, cluster: DrillCluster, scheduler: str):
    """Workers, machines and the tuner at random; the same decisions and the same weights as of one left alone."""
    write_slow(here, steps=120, checkpoint={"every_steps": 5})
    own = {"none": [], "hyperband": ["tune.grace=12"], "pbt": ["tune.interval=40"]}[scheduler]
    words = (
        *("slow.yaml", "space.yaml", "--trials", "12", "--workers", "2", "--scheduler", scheduler, *own, "--json"),
        *("--address", cluster.address),
    )
    calm = summary_of(start(*words, "--search-dir", "calm", folder=here, environment=cluster.environment))
    process = start(*words, "--search-dir", "wild", folder=here, environment=cluster.environment)
    chance, killed = random.Random(scheduler), []
    first = chance.sample(["worker", "machine", "tuner"], 3)
    while process.poll() is None:
        time.sleep(chance.uniform(1.0, 3.0))
        what = first[0] if first else chance.choice(["worker", "worker", "machine", "tuner"])
        if process.poll() is not None or killed.count(what) == 5:
            continue
        process, is_killed = _kill(what, process, cluster, chance, here)
        if is_killed:
            killed.append(what)
            first = first[1:]
    wild = summary_of(process)
    assert {"worker", "machine", "tuner"} <= set(killed)
    assert what_came_of(wild) == what_came_of(calm)
    assert wild["best"]["config"] == calm["best"]["config"]


def _kill(what: str, process: Any, cluster: DrillCluster, chance: random.Random, folder: Path) -> tuple[Any, bool]:
    """The process of the search from then on, and whether there was something to kill."""
    if what == "machine":
        cluster.kill(chance.choice(cluster.nodes()))
        cluster.mend()
    elif what == "worker":
        if not (pids := worker_pids(folder / "wild")):
            return process, False
        os.kill(chance.choice(pids), signal.SIGKILL)
    else:
        if not (folder / "wild" / "search.yaml").is_file():
            return process, False
        process.kill()
        process.communicate()
        words = ("--resume", "wild", "--address", cluster.address, "--json")
        process = start(*words, folder=folder, environment=cluster.environment)
    return process, True
