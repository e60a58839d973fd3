"""Workers by the real torchrun: started by the command, and by hand, on one machine and on two."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from shoal.core.errors import RunError, UserError
from shoal.launch.api import train
from shoal.launch.by_torchrun import _Stream
from shoal.launch.run import prepare
from shoal.launch.torchrun import Place, _own_part
from shoal.observe.runs import read_events
from tests.tiny import TINY

TASK = """
import os, time
from torch.nn.functional import cross_entropy

class Slow:
    def loss(self, model, batch):
        time.sleep(0.03 if os.environ.get("SLOW") else 0)
        return cross_entropy(model(batch[0]), batch[1])
"""
RECIPE = (
    "digits task=slow_task:Slow train.steps=60 observe.every_steps=1 checkpoint.every_steps=5 checkpoint.keep_best=0 "
    "checkpoint.metric=null cluster.threads_per_worker=1 cluster.gpus_per_worker=0"
).split()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of two workers that were started without torchrun."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "slow_task.py").write_text(TASK)
    out, err, status = finish(start(folder, "--launcher", "local", "--workers", "2", *RECIPE))
    assert status == 0, err
    return str(json.loads(out.splitlines()[-1])["weights_sha256"])


@pytest.fixture
def slow(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the task, which takes its time."""
    (here / "slow_task.py").write_text(TASK)
    monkeypatch.setenv("SLOW", "1")
    return here


def start(folder: Path, *arguments: str, torchrun: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    by_hand = ["-m", "torch.distributed.run", "--nproc-per-node", *torchrun] if torchrun else []
    return subprocess.Popen(
        [sys.executable, *by_hand, "-m", "shoal.cli.main", "train", "--json", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[str, str, int]:
    out, err = process.communicate(timeout=120)
    return out, err, process.returncode


def wait_for_step(folder: Path, step: int, process: "subprocess.Popen[str]") -> Path:
    """The folder of the only run, once it has come so far."""
    deadline = time.time() + 60
    while time.time() < deadline and process.poll() is None:
        for file in folder.glob("**/metrics.jsonl"):
            lines = [line for line in file.read_text().splitlines() if line.endswith("}")]
            if lines and json.loads(lines[-1])["step"] >= step:
                return file.parent
        time.sleep(0.02)
    process.terminate()
    raise AssertionError(f"step {step} was not reached: {finish(process)}")


def workers_of(run_dir: Path) -> dict[int, int]:
    """rank -> pid, of the newest start."""
    newest = [event for event in read_events(run_dir) if event["event"] == "workers"][-1]
    return {worker["rank"]: worker["pid"] for worker in newest["workers"]}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_torchrun_gives_the_weights_of_the_other_launchers_and_says_as_little(slow: Path, undisturbed: str) -> None:
    (slow / "slow_task.py").write_text(TASK.replace("Slow:", "Slow:\n    def __init__(self): print('made')\n"))
    out, err, status = finish(start(slow, "--launcher", "torchrun", "--workers", "2", *RECIPE))
    assert status == 0, err
    summary = json.loads(out)
    assert summary["weights_sha256"] == undisturbed
    assert summary["world_size"] == 2 and summary["restarts"] == 0 and summary["status"] == "done"
    assert summary["time_to_first_step_s"] > 0.5, "counted from the command, not from the workers"
    assert "torch/distributed" not in err and "OMP_NUM_THREADS" not in err
    assert err.count("on 2 workers (ddp), cpu") == 1 and "Traceback" not in err
    assert [line for line in sorted(err.splitlines()) if "made" in line] == ["[rank 0] made", "[rank 1] made"]


def test_a_killed_worker_is_started_again_and_nothing_is_lost(slow: Path, undisturbed: str) -> None:
    process = start(slow, "--launcher", "torchrun", "--workers", "2", *RECIPE)
    run_dir = wait_for_step(slow, 12, process)
    while not (run_dir / "checkpoints" / "step-00000010").is_dir():  # which is written while training goes on
        assert process.poll() is None, finish(process)
        time.sleep(0.02)
    before = workers_of(run_dir)
    os.kill(before[1], signal.SIGKILL)
    out, err, status = finish(process)
    assert status == 0, err
    summary = json.loads(out)
    assert summary["weights_sha256"] == undisturbed and Path(summary["run_dir"]) == run_dir
    assert summary["restarts"] == 1 and summary["resumed_from_step"] >= 10
    assert "worker 1: the worker's process ended without a word" in err and "starting again (restart 1)" in err
    assert "Traceback" not in err and "torch/distributed" not in err
    names = [event["event"] for event in read_events(run_dir)]
    assert names.index("failure") < names.index("restart") < names.index("resume")
    assert not set(workers_of(run_dir).values()) & set(before.values())


@pytest.mark.parametrize(
    ("task", "overrides", "expected", "says"),
    [
        pytest.param(
            *("", ["task=slow_task:Nothing"], 2, "error: task.name: module 'slow_task' has no 'Nothing'"),
            marks=pytest.mark.slow,
        ),
        ("raise ZeroDivisionError('at rank ' + os.environ['RANK'])", [], 1, "ZeroDivisionError: at rank 1"),
    ],
)
def test_an_error_that_would_come_again_is_told_once_and_not_retried(
    slow: Path, task: str, overrides: list[str], expected: int, says: str
) -> None:
    fails = f"if os.environ['RANK'] == '1': {task or 'pass'}"
    (slow / "slow_task.py").write_text(TASK.replace("time.sleep(", fails + "\n        time.sleep("))
    out, err, status = finish(start(slow, "--launcher", "torchrun", "--workers", "2", *RECIPE, *overrides))
    assert status == expected, err
    assert sum(line.endswith(says) or line.startswith(says) for line in err.splitlines()) <= 2 and says in err
    assert err.count("error: ") == 1 and "starting again" not in err and "torch/distributed/run" not in err
    if expected == 2:
        assert out == "" and not (slow / "runs").exists() and "Traceback" not in err
    else:
        assert json.loads(out)["status"] == "failed" and err.count("Traceback") == 1


@pytest.mark.slow
def test_ctrl_c_saves_and_the_run_can_be_resumed(slow: Path, undisturbed: str) -> None:
    process = start(slow, "--launcher", "torchrun", "--workers", "2", *RECIPE, "checkpoint.every_steps=1000")
    run_dir = wait_for_step(slow, 10, process)
    workers = workers_of(run_dir)
    os.killpg(process.pid, signal.SIGINT)
    out, err, status = finish(process)
    assert status == 130, err
    stopped = json.loads(out)
    assert stopped["status"] == "interrupted" and stopped["ended_by"] == "SIGINT" and 10 <= stopped["step"] < 60
    assert stopped["resume"] in err and "Traceback" not in err
    assert not any(is_alive(pid) for pid in workers.values())
    # Elsewhere the number of workers is torchrun's to say: the same command under it.
    out, err, status = finish(start(slow, "--resume", str(run_dir), torchrun=("2",)))
    assert status == 0, err
    final = json.loads(out)
    assert final["resumed_from_step"] == stopped["step"] and final["weights_sha256"] == undisturbed


def test_ctrl_c_before_there_are_workers_writes_nothing(slow: Path) -> None:
    process = start(slow, "--launcher", "torchrun", "--workers", "2", *RECIPE)
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    out, err, status = finish(process)
    assert status == 130 and out == "" and "Traceback" not in err
    assert not (slow / "runs").exists()


@pytest.mark.parametrize(
    "by_hand", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["by the command", "by hand"]
)
def test_a_signal_while_the_workers_get_ready_ends_it_at_once(slow: Path, by_hand: bool) -> None:
    # By the command, what a worker has started goes with it; by hand, that is torchrun's own affair.
    child = "0" if by_hand else "subprocess.Popen(['sleep', '300'], process_group=0).pid"
    lines = f"print('slow', {child}, file=sys.stderr, flush=True); time.sleep(60)"
    task = TASK.replace("class Slow:\n", f"class Slow:\n    def __init__(self):\n        {lines}\n")
    (slow / "slow_task.py").write_text(f"import subprocess, sys\n{task}")
    how = () if by_hand else ("--launcher", "torchrun", "--workers", "2")
    process = start(slow, *how, *RECIPE, torchrun=("2",) if by_hand else ())
    assert process.stderr is not None
    while "slow" not in (line := process.stderr.readline()):
        pass
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    out, err, status = finish(process)
    assert time.monotonic() - asked < 15, err
    assert out == "" and err.count("interrupted before anything was written") == 1
    assert by_hand or (status == 130 and "Traceback" not in err and not is_alive(int(line.split()[-1])))
    assert not list(slow.glob("runs/*"))


@pytest.mark.slow
def test_the_workers_end_with_the_command(slow: Path) -> None:
    process = start(slow, "--launcher", "torchrun", "--workers", "2", *RECIPE, "train.steps=2000")
    workers = workers_of(wait_for_step(slow, 2, process)).values()
    process.kill()
    process.communicate(timeout=60)
    deadline = time.time() + 5
    while any(is_alive(pid) for pid in workers) and time.time() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in workers)


@pytest.mark.slow
def test_two_machines_by_hand_survive_a_killed_worker_in_the_same_folder(slow: Path, undisturbed: str) -> None:
    """Two agents on the loopback; nobody names the folder, so it must be known again after the restart."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    meet = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1")
    command = ("1", *meet, "--max-restarts", "2")
    agents = [start(slow, *RECIPE, torchrun=command) for _ in range(2)]
    try:
        run_dir = wait_for_step(slow, 12, agents[0])
        os.kill(workers_of(run_dir)[1], signal.SIGKILL)
        outcomes = [finish(agent) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [status for _, _, status in outcomes] == [0, 0], outcomes
    (summary,) = [json.loads(out.splitlines()[-1]) for out, _, _ in outcomes if out]
    assert summary["weights_sha256"] == undisturbed and Path(summary["run_dir"]) == run_dir
    assert [path.name for path in (slow / "runs").iterdir()] == [run_dir.name]
    assert summary["world_size"] == 2 and summary["restarts"] == 1 and summary["resumed_from_step"] >= 10
    (event, _) = [event for event in read_events(run_dir) if event["event"] == "workers"]
    assert [worker["node"] for worker in event["workers"]] == ["0", "1"]
    assert all("Traceback" not in err.split("torch.distributed.elastic")[0] for _, err, _ in outcomes)


@pytest.mark.slow
def test_by_hand_a_mistake_is_told_once_for_all_workers(slow: Path) -> None:
    full = slow / "full"
    full.mkdir()
    (full / "file").write_text("precious")
    out, err, status = finish(start(slow, *RECIPE, "--run-dir", "full", torchrun=("2",)))
    assert status != 0 and out == ""
    assert err.count("error: --run-dir: full is not empty; choose another") == 1
    assert [path.name for path in full.iterdir()] == ["file"]


@pytest.mark.slow
def test_by_hand_a_signal_saves_and_rank_0_says_how_to_go_on(slow: Path) -> None:
    process = start(slow, *RECIPE, torchrun=("2",))
    run_dir = wait_for_step(slow, 5, process)
    process.send_signal(signal.SIGTERM)
    out, err, _ = finish(process)
    summary = json.loads(out)
    assert summary["status"] == "interrupted" and summary["ended_by"] == "SIGTERM"
    assert err.count(f"resume with:\n  shoal train --resume {run_dir}") == 1
    assert [path.name for path in (run_dir / "checkpoints").iterdir()][-1:] == [f"step-{summary['step']:08d}"]


@pytest.fixture
def two_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchrun had started this process and another."""
    told = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    told |= {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
    told |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)


def test_of_what_a_worker_prints_long_lines_are_cut_and_the_last_one_needs_no_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = _Stream(ours)
        stream.is_called("stdout")
        theirs.sendall(b"x" * 20_000 + b"\n1%\r2%\r3%")
        theirs.shutdown(socket.SHUT_WR)
        lines: list[str] = []
        while stream.lines.is_open:
            lines += stream.read()
    assert lines == ["x" * 10_000, "3%"]


@pytest.mark.usefixtures("two_started")
@pytest.mark.parametrize("overrides", [[], ["cluster.workers=2"], ["cluster.workers=4", "cluster.min_workers=1"]])
def test_the_number_of_workers_is_torchruns(here: Path, overrides: list[str]) -> None:
    recipe = TINY | {"cluster": {"workers": 4, "gpus_per_worker": 0}}
    cluster = prepare([recipe], overrides).loaded.recipe.cluster
    assert (cluster.workers, cluster.min_workers, cluster.gpus_per_worker) == (2, None, 0)


@pytest.mark.usefixtures("two_started")
@pytest.mark.parametrize("overrides", [["cluster.workers=4"], ["cluster.workers=4", "cluster.min_workers=3"]])
def test_another_number_of_workers_is_refused(here: Path, overrides: list[str]) -> None:
    with pytest.raises(UserError, match=r"cluster.workers: 4 is asked for and torchrun has started 2 processes; .*"):
        prepare([TINY], overrides)


@pytest.mark.usefixtures("two_started")
def test_what_two_workers_cannot_do_is_refused_under_torchrun_too(here: Path) -> None:
    with pytest.raises(UserError, match=r"cluster.workers: 2 workers are not possible with parallel.strategy single"):
        prepare([TINY], ["parallel.strategy=single"])


def test_a_changing_number_of_workers_is_not_torchruns(here: Path) -> None:
    changing = {"cluster.workers": 2, "cluster.min_workers": 1}
    with pytest.raises(UserError, match=r"cluster.min_workers: 1 to 2 workers are for Ray, .* --workers 2, or use"):
        train(TINY, changing, launcher="torchrun", progress="silent")
    assert list(here.iterdir()) == []


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def place_of(rank: int) -> Place:
    return Place(rank, 2, rank, 2, "0", 1, "127.0.0.1", 29500, restarts=0, has_store=True)


@pytest.mark.parametrize("late", [0, 1])
def test_workers_that_are_started_again_do_not_take_what_earlier_ones_said(store: TCPStore, late: int) -> None:
    parts = []
    for _ in range(3):
        found: dict[int, str] = {}

        def meet(rank: int, found: dict[int, str] = found) -> None:
            time.sleep(0.2 if rank == late else 0)
            client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))
            found[rank] = _own_part(client, place_of(rank), 20.0, lambda: None)

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found[0] == found[1]
        parts.append(found[0])
    assert len(set(parts)) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_waits_for_one_that_could_not_start_ends_when_asked(store: TCPStore, rank: int) -> None:
    """Else torchrun would wait half a minute for it."""
    asked = time.monotonic() + 0.3
    with pytest.raises(KeyboardInterrupt):
        _own_part(store, place_of(rank), 60.0, lambda: "SIGTERM" if time.monotonic() > asked else None)
    with pytest.raises(RunError, match=f"worker {rank} waited 0.2 s for the others to start"):
        _own_part(store, place_of(rank), 0.2, lambda: None)
