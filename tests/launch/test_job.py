import json
import sys
from pathlib import Path

import pytest

from shoal.launch.account import Account
from shoal.launch.attempt import Attempt
from shoal.launch.job import make_job, meeting_host, own_paths
from shoal.launch.run import Launch, prepare
from shoal.observe.console import SilentConsole
from tests.tiny import TINY


class Place:
    def __init__(self, node: str, address: str) -> None:
        self.node, self.host, self.address = node, node, address


def attempt_on(*nodes: str) -> Attempt:
    return Attempt(3, [Place(node, f"10.0.0.{ord(node)}") for node in nodes])  # type: ignore[misc]


def test_workers_of_one_machine_meet_where_nobody_else_can_come() -> None:
    assert meeting_host(attempt_on("a", "a")) == "127.0.0.1"
    assert meeting_host(attempt_on("a", "b")) == "10.0.0.97"


def test_a_job_is_plain_values_and_names_the_workers_place(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_LR", "0.5")
    overrides = {"optim.lr": "${env:SHOAL_TEST_LR}", "nccl.debug": "WARN", "failures.hang_timeout_s": 10}
    account = Account(prepare([TINY], overrides, run_dir="run"), Launch(SilentConsole()))
    attempt = attempt_on("a", "a", "b", "b")
    jobs = [make_job(account, attempt, rank, 1234, threads=2) for rank in range(4)]
    assert json.loads(json.dumps(jobs)) == jobs
    assert [(job["node"], job["local_rank"], job["address"]) for job in jobs] == [
        ("a", 0, "10.0.0.97"),
        ("a", 1, "10.0.0.97"),
        ("b", 0, "10.0.0.98"),
        ("b", 1, "10.0.0.98"),
    ]
    assert jobs[0]["run_dir"] == str(here / "run") and jobs[0]["starts"] == 3 and jobs[0]["resume"] is False
    assert jobs[2]["meeting"] == {"rank": 2, "world_size": 4, "host": "10.0.0.97", "port": 1234, "timeout_s": 70}
    assert jobs[0]["environment"] == {"NCCL_DEBUG": "WARN", "SHOAL_TEST_LR": "0.5"}
    assert "0.5" not in json.dumps(jobs[0]["recipe"]), "the recipe keeps the reference"


def test_only_the_users_own_paths_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "/not/there", *sys.path])
    found = own_paths()
    assert found[0] == str(tmp_path) and "" not in found and "/not/there" not in found
    assert not any(part in path for path in found for part in ("site-packages", "lib-dynload", "/lib/python3"))


def test_where_to_pause_and_by_which_address_it_was_started_travel_with_a_job(here: Path) -> None:
    prepared = prepare([TINY], run_dir="run")
    for pause_at in (None, 2.5):
        account = Account(prepared, Launch(SilentConsole(), address="10.0.0.1:6379", pause_at=pause_at))
        job = make_job(account, attempt_on("a"), 0, 1234, threads=1)
        assert job["pause_at"] == pause_at and job["launch"] == account.how.asked
        assert json.loads(json.dumps(job)) == job
