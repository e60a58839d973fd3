"""`shoal drill` as it is typed: what it prints, its exit status, and what it leaves running."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.bench.drill_breaks import BREAKS
from shoal.cli.main import run
from shoal.observe.runs import read_events
from tests.launch.processes import is_alive, wait_until_dead
from tests.tiny import own_recipe, write_own_task

Capture = pytest.CaptureFixture[str]
LONGER = ["train.steps=300", "checkpoint.every_steps=20", "--launcher", "local"]


def write_recipe(folder: Path, module: str, in_loss: str) -> str:
    write_own_task(folder, module, in_loss)
    (folder / f"{module}.yaml").write_text(json.dumps(own_recipe(module)))
    return f"{module}.yaml"


@pytest.mark.slow
def test_a_run_that_loses_nothing_passes(here: Path, capfd: Capture) -> None:
    recipe = write_recipe(here, "task_of_good_drill", "import time; time.sleep(0.005)")
    assert run(["drill", recipe, *LONGER, "--seed", "2"]) == 0
    out, err = capfd.readouterr()
    header, row, *rest = out.splitlines()
    assert header.split()[:4] == ["drill", "broken", "noticed", "training"]
    assert row.startswith("kill-worker  worker ") and row.endswith("2 > 2    same     passed")
    assert rest == [
        "compared (kill-worker): weights, losses and validation metrics to the last bit; "
        "every step once, its number of samples and its learning rate"
    ]
    assert "undisturbed: training" in err and "kill-worker: training, to be broken at step" in err
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_state_that_a_restart_forgets_is_a_loss(here: Path, capfd: Capture) -> None:
    """The task counts its steps in an attribute, which no checkpoint holds, and its loss goes by it."""
    recipe = write_recipe(here, "task_of_lossy_drill", "return model(batch[0]).square().mean() / step")
    assert run(["drill", recipe, *LONGER, "--kill-worker", "--dir", "kept", "--json"]) == 1
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    result = json.loads(line)
    (drill,) = result["drills"]
    assert result["passed"] is drill["passed"] is drill["same_weights"] is False
    assert any(loss.startswith("the weights differ: ") for loss in drill["losses"])
    assert any(loss.startswith("the training loss of step ") for loss in drill["losses"])
    assert "kill-worker: the weights differ: " in err and f"the runs are in {here / 'kept'}" in err
    assert (here / "kept" / "kill-worker" / "events.jsonl").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("digits --kill-node --launcher local", "--kill-node: takes a machine away from Ray, but --launcher is local"),
        ("digits --preempt --address auto", "--preempt: the machines of auto are not the drill's to take away"),
        ("digits --kill-node cluster.gpus_per_worker=1", "cluster.gpus_per_worker: 1, but the nodes that --kill-node"),
        ("digits --address auto --launcher local", "--address: is for Ray, but --launcher is local"),
        ("digits --launcher local --workers 1", "--workers: 1 trains in the launcher itself"),
        ("digits --kill-while-saving --launcher local --workers 1", "nobody would be left after --kill-while-saving"),
        ("digits --launcher local --workers 0", "--workers: '0' should be a whole number above 0"),
        ("digits --launcher torchrun", "'torchrun' is not one of"),
        ("digits optim.lrr=1", "optim.lrr: unknown key"),
        ("digts", "recipe 'digts': neither a file here nor a recipe"),
        ("digits --dir full --launcher local", "is not an empty folder"),
        ("digits --seed x", "'x' is not a valid integer"),
    ],
)
def test_wrong_input_is_told_before_anything_starts(here: Path, capfd: Capture, arguments: str, says: str) -> None:
    (here / "full").mkdir()
    (here / "full" / "file").touch()
    assert run(["drill", *arguments.split()]) == 2
    out, err = capfd.readouterr()
    assert out == "" and says in err and "Traceback" not in err and "undisturbed" not in err
    assert sorted(path.name for path in here.iterdir()) == ["full"]


def test_every_drill_has_a_flag(capfd: Capture) -> None:
    assert run(["drill", "--help"]) == 0
    out, _ = capfd.readouterr()
    assert all(f"--{name} " in out for name in BREAKS)


def test_wrong_input_that_only_the_run_finds_is_told(here: Path, capfd: Capture) -> None:
    assert run(["drill", "digits", "task=nowhere:Task", "--launcher", "local"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and "error: task.name: " in err and "nowhere" in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_even_a_worker_that_stands(here: Path, number: int) -> None:
    words = ["digits", "train.steps=150", "train.epochs=null", "checkpoint.every_steps=10", "--launcher", "local"]
    drill = subprocess.Popen(
        [sys.executable, "-m", "shoal.cli.main", "drill", *words, "--hang-worker", "--dir", "kept"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert drill.stderr is not None
        while "stopped (process" not in (line := drill.stderr.readline()):
            assert line, "it ended too early"
        workers = [event for event in read_events(here / "kept" / "hang-worker") if event["event"] == "workers"]
        pids = [worker["pid"] for worker in workers[-1]["workers"]]
        assert len(pids) == 2 and all(map(is_alive, pids))
        drill.send_signal(number)
        began = time.monotonic()
        _, err = drill.communicate(timeout=60)
        assert drill.returncode == 130
        assert "everything that the drill had started has been ended" in err and "Traceback" not in err
        wait_until_dead(*pids)
        assert time.monotonic() - began < 40
    finally:
        drill.kill()
        drill.wait()
