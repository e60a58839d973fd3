"""Signals to a real `shoal train`: once saves and says how to resume, with status 130; twice stops at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.launch.api import train

TASK = """
import time, torch

class Slow:
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def datasets(self):
        torch.manual_seed(1)
        train = [(torch.randn(4), torch.randn(1)) for _ in range(64)]
        return {"train": train, "val": [(torch.ones(4), torch.ones(1))] * 8}

    def loss(self, model, batch):
        time.sleep(0.02)
        return (model(batch[0]) - batch[1]).pow(2).mean()
"""
ARGUMENTS = (
    "task=slow_task:Slow data.workers=1 model=null train.steps=90 train.global_batch=8 optim.lr=0.01 "
    "cluster.threads_per_worker=1 cluster.gpus_per_worker=0 evaluate.every_steps=30 observe.every_steps=1 "
    "checkpoint.every_steps=1000 checkpoint.keep_best=0 checkpoint.metric=null"
).split()


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shoal.cli.main", "train", "--json", *arguments]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_step(folder: Path, step: int, timeout_s: float = 60.0) -> None:
    deadline = time.time() + timeout_s
    while time.time() < deadline:
        lines = list(folder.glob("runs/*/metrics.jsonl"))
        if lines and any(
            json.loads(line)["step"] >= step for line in lines[0].read_text().splitlines() if line[-1:] == "}"
        ):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "slow_task.py").write_text(TASK)
    process = start(folder, *ARGUMENTS)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return str(json.loads(out.splitlines()[-1])["weights_sha256"])


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_saves_the_step_and_the_printed_command_resumes_it(here: Path, undisturbed: str, number: int) -> None:
    (here / "slow_task.py").write_text(TASK)
    process = start(here, *ARGUMENTS)
    wait_for_step(here, 20)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    summary = json.loads(out.splitlines()[-1])
    assert summary["status"] == "interrupted" and 20 <= summary["step"] < 90
    assert summary["resume"] in err
    folder = Path(here / summary["run_dir"])
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{summary['step']:08d}"]

    words = summary["resume"].split()
    assert words[:3] == ["shoal", "train", "--resume"]
    resumed = start(here, *words[2:])
    out, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    final = json.loads(out.splitlines()[-1])
    assert final["resumed_from_step"] == summary["step"]
    assert final["weights_sha256"] == undisturbed


def test_a_second_signal_stops_at_once(here: Path) -> None:
    slow = TASK.replace("time.sleep(0.02)", "time.sleep(0.02 if torch.rand(()) > 1 else 4.0)")
    (here / "slow_task.py").write_text(slow)
    process = start(here, *ARGUMENTS)
    wait_for_step(here, 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    asked = time.time()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.time() - asked < 2.5, "it waited for the step to end"
    assert "stopped at once" in err and "Traceback" not in err
    assert not list(here.glob("runs/*/checkpoints/step-*"))


@pytest.mark.parametrize("line", ["torch.manual_seed(1)", "time.sleep(0.02)"], ids=["loading", "in the first step"])
def test_a_signal_before_the_end_of_the_first_step_ends_it_at_once_and_writes_nothing(here: Path, line: str) -> None:
    (here / "slow_task.py").write_text(TASK.replace(line, "print('slow', flush=True); time.sleep(60)"))
    process = start(here, *ARGUMENTS)
    assert process.stdout is not None
    assert process.stdout.readline() == "slow\n"
    process.send_signal(signal.SIGINT)
    asked = time.time()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and time.time() - asked < 10, err
    assert "SIGINT: ending, because no step was taken yet" in err and "interrupted before anything was written" in err
    assert "Traceback" not in err and "nothing" not in err.replace("before anything was written", "")
    assert not list(here.glob("runs/*"))


@pytest.mark.slow
def test_a_signal_in_the_first_step_of_a_resumed_run_leaves_what_there_was(here: Path) -> None:
    (here / "slow_task.py").write_text(TASK)
    out, err = start(here, *ARGUMENTS, "train.steps=3", "--run-dir", "run").communicate(timeout=60)
    assert json.loads(out.splitlines()[-1])["status"] == "done", err
    (here / "slow_task.py").write_text(TASK.replace("time.sleep(0.02)", "print('slow', flush=True); time.sleep(60)"))
    process = start(here, "--resume", "run", "train.steps=6")
    assert process.stdout is not None
    assert process.stdout.readline() == "slow\n"
    process.send_signal(signal.SIGTERM)
    asked = time.time()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and time.time() - asked < 10, err
    summary = json.loads(out.splitlines()[-1])
    assert (summary["status"], summary["step"], summary["ended_by"]) == ("interrupted", 3, "SIGTERM")
    assert summary["resume"] in err and [path.name for path in (here / "run/checkpoints").iterdir()] == [
        "step-00000003"
    ]


def test_a_killed_process_leaves_a_run_that_resumes_exactly(here: Path, undisturbed: str) -> None:
    (here / "slow_task.py").write_text(TASK)
    process = start(here, *ARGUMENTS, "checkpoint.every_steps=10")
    wait_for_step(here, 25)
    process.kill()
    process.communicate(timeout=60)
    run_dir = next(here.glob("runs/*"))
    resumed = start(here, "--resume", str(run_dir))
    out, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    final = json.loads(out.splitlines()[-1])
    assert final["resumed_from_step"] >= 20 and final["resumed_from_step"] % 10 == 0
    assert final["weights_sha256"] == undisturbed


def test_in_a_thread_training_works_and_leaves_signals_alone(here: Path) -> None:
    import threading

    results: list[dict[str, object]] = []
    before = signal.getsignal(signal.SIGINT)
    overrides = {"train.steps": 3, "cluster.gpus_per_worker": 0}
    thread = threading.Thread(target=lambda: results.append(train("digits", overrides, progress="silent")))
    thread.start()
    thread.join()
    assert results[0]["status"] == "done"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_that_reaches_every_process_of_the_job_still_saves(here: Path, number: int) -> None:
    """As Slurm, systemd and a Ctrl-C under `| tee` send it: to the trainer, its loader workers, and whoever reads."""
    (here / "slow_task.py").write_text(TASK)
    process = start(here, *ARGUMENTS)
    wait_for_step(here, 5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children, "there should be a loader worker"
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    for pid in [*map(int, children), process.pid]:
        os.kill(pid, number)
    assert process.wait(timeout=60) == 130
    assert list(here.glob("runs/*/checkpoints/step-*"))
    assert json.loads(next(here.glob("runs/*/summary.json")).read_text())["status"] == "interrupted"
    deadline = time.time() + 10
    while time.time() < deadline and any(Path(f"/proc/{pid}").exists() for pid in children):
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children), "loader workers outlived the run"


def test_output_that_nobody_reads_does_not_stop_a_run(here: Path) -> None:
    (here / "slow_task.py").write_text(TASK)
    process = start(here, *ARGUMENTS, "train.steps=30")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert json.loads(next(here.glob("runs/*/summary.json")).read_text())["status"] == "done"
