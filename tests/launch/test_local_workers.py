"""`shoal train --workers 2 --launcher local` as a person meets it: output, exit status, Ctrl-C, and being killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.observe.runs import read_events, read_metrics
from tests.launch.processes import parent_of, wait_until_dead
from tests.tiny import write_own_task

WORDS = (
    "task=slow_task:Task train.steps=60 train.global_batch=8 evaluate.every_steps=30 observe.every_steps=1 "
    "checkpoint.every_steps=1000 model=null data=null checkpoint.metric=null checkpoint.keep_best=0 "
    "cluster.threads_per_worker=1 cluster.gpus_per_worker=0 --workers 2 --launcher local"
).split()
SLOW = "import time; time.sleep(0.02 * model.training)"


def start(folder: Path, *words: str, in_loss: str = SLOW) -> subprocess.Popen[str]:
    write_own_task(folder, "slow_task", in_loss)
    command = [sys.executable, "-m", "shoal.cli.main", "train", "--json", *words]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> Path:
    """The run's folder, when it has come so far."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for run in folder.glob("runs/*"):
            if any(record["step"] >= step for record in read_metrics(run)):
                return run
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def processes_of(run: Path) -> list[int]:
    """The workers and the warm process that they were forked from."""
    workers = [event for event in read_events(run) if event["event"] == "workers"][-1]["workers"]
    return [*(worker["pid"] for worker in workers), parent_of(workers[0]["pid"])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    line = "model.training and step == 3 and print('three', flush=True)"
    process = start(folder, *WORDS, in_loss=line)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (summary,) = [json.loads(line) for line in out.splitlines()]
    assert summary["status"] == "done" and summary["world_size"] == 2
    assert json.loads((folder / summary["run_dir"] / "summary.json").read_text()) == summary
    assert sorted(line for line in err.splitlines() if "three" in line) == ["[rank 0] three", "[rank 1] three"]
    wait_until_dead(*[worker["pid"] for worker in read_events(folder / summary["run_dir"])[1]["workers"]])
    return str(summary["weights_sha256"])


@pytest.mark.slow
def test_a_signal_saves_and_the_printed_command_resumes_exactly(here: Path, undisturbed: str) -> None:
    process = start(here, *WORDS)
    pids = processes_of(wait_for_step(process, here, 5))
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    summary = json.loads(out.splitlines()[-1])
    assert summary["status"] == "interrupted" and 5 <= summary["step"] < 60
    assert summary["resume"] in err
    wait_until_dead(*pids)
    resumed = start(here, *summary["resume"].split()[2:], "--launcher", "local")
    out, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    final = json.loads(out.splitlines()[-1])
    assert final["weights_sha256"] == undisturbed
    assert final["resumed_from_step"] == summary["step"] and final["world_size"] == 2


def test_a_second_signal_ends_everything_at_once(here: Path) -> None:
    process = start(here, *WORDS, in_loss="import time; time.sleep(30 if step == 3 else 0)")
    pids = processes_of(wait_for_step(process, here, 2))
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.7)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "stopped at once" in err and "Traceback" not in err
    wait_until_dead(*pids)


def test_a_signal_while_the_workers_start_ends_it_without_a_trace(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("sockets")))
    process = start(here, *WORDS, in_loss="pass")
    while not list(Path(os.environ["TMPDIR"]).glob("shoal-*/*-*")):  # where the warm process listens
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err and "before anything was written" in err and out == ""
    assert not (here / "runs").exists()


@pytest.mark.parametrize("where", [pytest.param("model", marks=pytest.mark.slow), "first step"])
def test_a_signal_before_the_first_step_is_done_ends_it_at_once(here: Path, where: str) -> None:
    """Whatever the workers are at: they do not listen while they build a model, or compile it in the first step."""
    process = start(here, *WORDS, in_loss="print('slow', flush=True); import time; time.sleep(60)")
    if where == "model":
        code = (here / "slow_task.py").read_text()
        slow = "def model(self):\n        print('slow', flush=True); import time; time.sleep(60)\n        "
        assert "def model(self): " in code
        (here / "slow_task.py").write_text(code.replace("def model(self): ", slow))
    assert process.stderr is not None
    while "slow" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and time.monotonic() - asked < 10
    assert "SIGTERM: ending, because no step was taken yet" in err and "Traceback" not in err
    assert "interrupted before anything was written" in err and out == ""
    assert not list(here.glob("runs/*"))


@pytest.mark.slow
def test_a_killed_command_leaves_no_process_and_a_run_that_resumes_exactly(here: Path, undisturbed: str) -> None:
    process = start(here, *WORDS, "checkpoint.every_steps=10")
    run = wait_for_step(process, here, 25)
    pids = processes_of(run)
    process.kill()
    process.communicate(timeout=60)
    wait_until_dead(*pids, within_s=5.0)
    resumed = start(here, "--resume", str(run), "--launcher", "local")
    out, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    final = json.loads(out.splitlines()[-1])
    assert final["weights_sha256"] == undisturbed and final["resumed_from_step"] in (20, 30)


def test_an_error_of_the_users_code_is_told_first_with_status_1(here: Path) -> None:
    line = "assert torch.distributed.get_rank() == 0 or step < 5, 'it is wrong here'"
    process = start(here, *WORDS, "checkpoint.every_steps=2", in_loss=line)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    (summary,) = [json.loads(line) for line in out.splitlines()]
    assert summary["status"] == "failed" and "it is wrong here" in summary["error"] and summary["step"] >= 2
    told = err[err.index("Traceback") :].splitlines()
    assert told[0] == "Traceback (most recent call last):"
    assert "AssertionError: it is wrong here" in told
    assert told[-2].startswith("error: worker 1 on ") and told[-2].endswith("AssertionError: it is wrong here")
    assert told[-1].startswith("error: to go on from the last checkpoint: shoal train --resume ")
    assert err.count("Traceback") == 1 and "shoal/launch" not in err and "Connection" not in err


def test_wrong_input_that_only_workers_find_ends_with_status_2_and_writes_nothing(here: Path) -> None:
    process = start(here, *WORDS, "task=slow_task:Tusk")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == "error: task.name: module 'slow_task' has no 'Tusk'; did you mean Task?\n" and out == ""
    assert not (here / "runs").exists()
