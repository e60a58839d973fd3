import os
import socket
from pathlib import Path

import pytest
import torch

from shoal.core.errors import UserError
from shoal.launch.local import run_here
from shoal.launch.run import Launch, prepare
from shoal.observe.console import SilentConsole
from shoal.observe.runs import read_events
from tests.tiny import TINY


def test_the_worker_runs_in_this_very_process(here: Path) -> None:
    summary = run_here(prepare([TINY], run_dir="run"), Launch(SilentConsole()))
    assert summary["status"] == "done" and summary["world_size"] == 1
    (workers,) = [event for event in read_events(here / "run") if event["event"] == "workers"]
    (worker,) = workers["workers"]
    assert worker["rank"] == 0 and worker["pid"] == os.getpid()
    assert worker["host"] == socket.gethostname() and worker["device"] == "cpu" and worker["threads"] == 1


def test_a_single_worker_may_be_data_parallel_by_itself(here: Path) -> None:
    plain = run_here(prepare([TINY], run_dir="plain"), Launch(SilentConsole()))
    alone = run_here(prepare([TINY], {"parallel.strategy": "ddp"}, run_dir="ddp"), Launch(SilentConsole()))
    assert alone["weights_sha256"] == plain["weights_sha256"] and alone["metrics"] == plain["metrics"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_told_before_anything_is_written(here: Path) -> None:
    prepared = prepare([TINY], {"cluster.gpus_per_worker": 1}, run_dir="run")
    with pytest.raises(UserError, match=r"cluster.gpus_per_worker"):
        run_here(prepared, Launch(SilentConsole()))
    assert list(here.iterdir()) == []


def test_the_time_to_the_first_step_counts_from_when_the_user_asked(here: Path) -> None:
    import time

    summary = run_here(prepare([TINY], run_dir="run"), Launch(SilentConsole(), started=time.time() - 100))
    assert 100 <= summary["time_to_first_step_s"] < 130
    assert summary["seconds"]["start"] >= 99 and summary["goodput"] < 0.1
