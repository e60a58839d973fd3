"""`shoal submit` on a real cluster: sent, followed, left alone, stopped, gone on with; and what is wrong with input."""

import contextlib
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import run
from shoal.cli.submit import _hint
from shoal.launch.submit import State
from shoal.observe.runs import read_run
from tests.head import Head, head_node

Capture = pytest.CaptureFixture[str]
Popen = subprocess.Popen[str]
SECRET = "s3cr3t-h0rse-battery"
NOBODY = "http://127.0.0.1:1"
TASK = f"""
import os, pathlib, time, torch

class Slow:
    def __init__(self, pause_s=0.0, fails_at=-1, password=""):
        self.pause_s, self.fails_at, self.step = pause_s, fails_at, 0
        if password:
            assert password == os.environ["MY_PASSWORD"] == "{SECRET}"
            assert "MY_OTHER" not in os.environ
            assert not pathlib.Path(".env").exists() and not pathlib.Path("large.bin").exists()
            assert pathlib.Path("small.txt").read_text() == "small"
            print("all is as it should be")

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def datasets(self):
        torch.manual_seed(1)
        train = [(torch.randn(4), torch.randn(1)) for _ in range(64)]
        return {{"train": train, "val": train[:8]}}

    def loss(self, model, batch):
        self.step += model.training
        if self.step == self.fails_at:
            raise ArithmeticError("made to fail")
        time.sleep(self.pause_s)
        return (model(batch[0]) - batch[1]).pow(2).mean()
"""
RECIPE = {
    "name": "slow",
    "task": {"name": "slow_task:Slow"},
    "train": {"steps": 8, "global_batch": 8},
    "evaluate": {"every_steps": 1000},
    "checkpoint": {"every_steps": 1000},
    "observe": {"every_steps": 1},
    "cluster": {"workers": 2, "threads_per_worker": 1, "gpus_per_worker": 0},
}


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """One cluster for all tests here."""
    with head_node() as found:
        yield found


@pytest.fixture
def submit(head: Head, here: Path) -> Iterator[Callable[..., Popen]]:
    """`shoal submit` to the cluster, from a folder with a task and its recipe."""
    (here / "slow_task.py").write_text(TASK)
    (here / "slow.yaml").write_text(json.dumps(RECIPE))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_TOKEN": head.token, "MY_PASSWORD": SECRET, "MY_OTHER": "another"}
    processes: list[Popen] = []

    def start(*arguments: str, address: str = head.address) -> Popen:
        command = [sys.executable, "-m", "shoal.cli.main", "submit", *arguments, "--address", address]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def ended(process: Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


def last_json(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if run_dir.is_dir() and read_run(run_dir).step >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached")


# ---------------------------------------------------------------- to the end


def test_a_job_is_followed_to_its_end_and_its_run_is_seen_here(
    submit: Callable[..., Popen], head: Head, here: Path, capfd: Capture
) -> None:
    status, out, err = ended(
        submit("digits", "train.epochs=2", "cluster.threads_per_worker=1", "--workers", "2", "--name", "trial")
    )
    assert status == 0, out + err
    (run_dir,) = (here / "runs").iterdir()
    job_id = run_dir.name
    assert job_id.startswith("trial-20")
    assert err.splitlines()[:3] == [
        f"job {job_id} is sent to {head.address}",
        f"  run folder  {run_dir} (must be on storage that all machines share)",
        f"  dashboard   {head.address}/#/jobs/{job_id}",
    ]
    assert f"job {job_id}: done at step 46  train_loss " in err and f"  shoal runs show {run_dir}" in err
    assert f"{job_id}: 13,754 parameters on 2 workers (ddp), cpu" in out and "step 46/46  epoch 2.00  val_loss" in out
    for chatter in ("entrypoint", "Runtime env", "INFO", "weights_sha256", "Traceback"):
        assert chatter not in out + err
    assert run(["runs", "show", str(run_dir)]) == 0
    shown = capfd.readouterr().out
    assert f"{run_dir}  done, step 46, " in shown and "\n2 workers, 0 restarts, " in shown


@pytest.mark.slow
def test_code_and_named_variables_travel_and_nothing_else(submit: Callable[..., Popen], here: Path) -> None:
    (here / "small.txt").write_text("small")
    (here / ".env").write_text("MY_THIRD=x\n")
    with (here / "large.bin").open("w") as file:
        file.truncate(26 << 20)
    run_dir = here / "shared folder" / "one"
    arguments = ["slow.yaml", "task.args.password=${env:MY_PASSWORD}", "--working-dir", ".", "--run-dir", str(run_dir)]
    status, out, err = ended(submit(*arguments, "--wait", "--json"))
    assert status == 0, err
    found = last_json(out)
    assert out.count("\n") == 1 and found.keys() == {"job_id", "run_dir", "status", "summary"}
    assert (found["run_dir"], found["status"]) == (str(run_dir), "succeeded")
    assert found["summary"] == json.loads((run_dir / "summary.json").read_text())
    assert (found["summary"]["status"], found["summary"]["world_size"]) == ("done", 2)
    assert "warning: --working-dir: large.bin (26 MiB, and files above 25 MiB stay) is not sent" in err
    assert "step 8" in err and "all is as" not in err, "--wait shows no log"
    assert "${env:MY_PASSWORD}" in (run_dir / "recipe.yaml").read_text()
    assert SECRET not in out + err
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert files and not any(SECRET.encode() in path.read_bytes() for path in files)


def test_a_job_that_fails_is_status_1_with_its_reason(submit: Callable[..., Popen]) -> None:
    arguments = ["slow.yaml", "task.args.fails_at=3", "--working-dir", "."]
    status, out, err = ended(submit(*arguments, "--wait", "--json"))
    assert status == 1
    found = last_json(out)
    assert (found["status"], found["summary"]["status"]) == ("failed", "failed")
    assert "made to fail" in found["summary"]["error"]
    assert "ArithmeticError: made to fail" in err, "the end of the log tells why"


# ---------------------------------------------------------------- left alone, stopped, gone on with


READ_ELSEWHERE = """
import ray, slow_task

class Items:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        sent = ray.get_runtime_context().runtime_env["working_dir"]  # no reader of another machine had it otherwise
        assert sent.startswith("gcs://"), sent
        return float(index) + slow_task.torch.zeros(4), slow_task.torch.zeros(1)

class Task(slow_task.Slow):
    def datasets(self):
        return {"train": Items()}
"""


@pytest.mark.slow
def test_what_reads_on_the_cluster_has_the_code_too(submit: Callable[..., Popen], here: Path) -> None:
    (here / "elsewhere.py").write_text(READ_ELSEWHERE)
    words = ["task=elsewhere:Task", "data.loader=ray", "data.workers=1", "cluster.workers=1"]
    status, out, err = ended(submit("slow.yaml", *words, "--working-dir", ".", "--wait", "--json"))
    assert status == 0, err
    assert last_json(out)["summary"]["step"] == 8


@pytest.mark.slow
def test_ctrl_c_leaves_the_job_running_and_follow_shows_it_all(
    submit: Callable[..., Popen], head: Head, here: Path
) -> None:
    first = submit("slow.yaml", "task.args.pause_s=0.3", "train.steps=40", "--working-dir", ".", "--json")
    assert first.stderr is not None
    job_id = first.stderr.readline().split()[1]
    wait_for_step(here / "runs" / job_id, 3)
    first.send_signal(signal.SIGINT)
    status, out, err = ended(first)
    assert status == 130 and "Traceback" not in err
    assert last_json(out) == {"job_id": job_id, "run_dir": str(here / "runs" / job_id), "status": "running"}
    assert f"job {job_id} goes on there" in err
    again = f"shoal submit --follow {job_id} --address {head.address}"
    assert f"  follow  {again}\n" in err and f"  stop    shoal submit --stop {job_id}" in err

    # Over a connection that breaks in the middle: what was seen is not shown twice, and nothing is left out.
    with Relay(head.address) as relay:
        second = submit(*again.split()[2:4], address=relay.address)
        assert second.stdout is not None
        lines = [second.stdout.readline()]
        while not lines[-1].startswith("step"):
            lines.append(second.stdout.readline())
        relay.cut()
        status, out, err = ended(second)
    assert status == 0, err
    lines += out.splitlines(keepends=True)
    steps = [int(line.split()[1].partition("/")[0]) for line in lines if line.startswith("step")]
    assert steps[0] == 1 and 40 in steps and steps == sorted(steps)
    assert len(set(lines)) == len(lines), "no line twice"
    assert f"job {job_id}: done at step 40" in err


@pytest.mark.slow
def test_a_job_that_is_stopped_has_saved_and_goes_on_as_if_it_had_not(
    submit: Callable[..., Popen], head: Head, here: Path
) -> None:
    steady = ended(submit("slow.yaml", "train.steps=14", "--working-dir", ".", "--wait", "--json"))
    arguments = ["task.args.pause_s=0.25", "train.steps=14", "--working-dir", "."]
    status, out, err = ended(submit("slow.yaml", *arguments, "--no-follow", "--json"))
    assert status == 0 and f"  stop    shoal submit --stop {last_json(out)['job_id']}" in err
    job_id, run_dir = last_json(out)["job_id"], Path(last_json(out)["run_dir"])
    wait_for_step(run_dir, 3)
    following = submit("--follow", job_id)
    status, out, err = ended(submit("--stop", job_id, "--json"))
    assert status == 0, err
    found = last_json(out)
    assert (found["status"], found["summary"]["status"]) == ("stopped", "interrupted")
    step = found["summary"]["step"]
    assert 3 <= step < 14 and (run_dir / "checkpoints" / f"step-{step:08d}").is_dir()
    status, out, err = ended(following)
    assert status == 130 and f"job {job_id}: interrupted at step {step}" in err
    resume = f"shoal submit --resume {run_dir} --address {head.address}"
    assert resume in err

    status, out, err = ended(submit("--resume", str(run_dir), "--working-dir", ".", "--wait", "--json"))
    assert status == 0, err
    summary = last_json(out)["summary"]
    assert summary["resumed_from_step"] == step and summary["run_dir"] == str(run_dir)
    assert summary["weights_sha256"] == last_json(steady[1])["summary"]["weights_sha256"]
    status, out, err = ended(submit("--stop", job_id))
    assert status == 0 and f"job {job_id} has already ended" in err


class Relay:
    """Passes connections on to a cluster, until they are cut; new ones are taken again."""

    def __init__(self, address: str) -> None:
        self._to = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        for end in self._open:
            shut(end)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            self._open += [near, far]
            for ends in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pass_on, args=ends)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        shut(source)
        shut(target)


def shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (f"digts --address {NOBODY}", "did you mean digits?"),
        (f"digits optim.lr=-1 --address {NOBODY}", "optim.lr: "),
        (f"digits --workers x --address {NOBODY}", "--workers: 'x' should be"),
        (f"digits --name a/b --address {NOBODY}", "name: "),
        (f"digits --working-dir nowhere --address {NOBODY}", "--working-dir: nowhere is no folder"),
        (f"digits --run-dir full --address {NOBODY}", "--run-dir: full is not empty"),
        (f"--resume nothing --address {NOBODY}", "run 'nothing': not found"),
        (f"digits --wait --no-follow --address {NOBODY}", "--wait: "),
        (f"digits --follow job --address {NOBODY}", "--follow: is for a job that was sent"),
        (f"--follow job --stop job --address {NOBODY}", "--follow: is for a job that was sent"),
        (f"--stop job --workers 2 --address {NOBODY}", "--stop: is for a job that was sent"),
        ("digits", "--address: is missing"),
        ("digits --address head:8265", "--address: 'head:8265' should be that of the cluster's dashboard"),
        (f"digits --address {NOBODY}", f"--address: nothing answers at {NOBODY} ([Errno 111] Connection refused)"),
        ("digits --address http://nobody.invalid:8265", "--address: nothing answers at http://nobody.invalid:8265"),
    ],
)
def test_wrong_input_is_status_2_and_nothing_is_sent(here: Path, arguments: str, says: str, capfd: Capture) -> None:
    (here / "full").mkdir()
    (here / "full" / "file").write_text("x")
    assert run(["submit", *arguments.split()]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and says in err and "Traceback" not in err
    assert [path.name for path in here.iterdir()] == ["full"]


def test_another_server_is_told_from_a_cluster(here: Path, capfd: Capture) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        status = run(["submit", "digits", "--address", address])
        server.shutdown()
        thread.join()
    assert status == 2 and f"what answers at {address} is no Ray dashboard" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RAY_AUTH_TOKEN": "wrong"}, "asks for Ray's token and refuses the one it gets"),
        ({"RAY_AUTH_MODE": "disabled"}, "asks for Ray's token and gets none"),
        ({"RAY_AUTH_TOKEN_PATH": "nowhere"}, "Ray's token cannot be read: RAY_AUTH_TOKEN_PATH is set but"),
    ],
)
def test_a_token_that_is_wrong_or_missing_is_status_2(
    head: Head, here: Path, variables: dict[str, str], says: str
) -> None:
    # Ray keeps a token that it has read, so each in a process of its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", "submit", "digits", "--address", head.address],
        env=environment | {"HOME": str(here)} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr.startswith("error: --address: ") and says in process.stderr
    assert process.stderr.count("\n") == 1 and head.token not in process.stderr


def test_a_token_in_the_home_folder_opens_the_cluster_whatever_ray_address_says(
    submit: Callable[..., Popen], head: Head, here: Path
) -> None:
    (here / ".ray").mkdir()
    (here / ".ray" / "auth_token").write_text(head.token)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", "submit", "--follow", "nothing", "--address", head.address],
        env=environment | {"HOME": str(here), "RAY_ADDRESS": "10.0.0.1:6379"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 2
    assert f"error: job 'nothing': not known at {head.address}" in process.stderr


def test_code_that_is_here_and_not_sent_is_warned_of(here: Path, capfd: Capture) -> None:
    (here / "slow_task.py").write_text(TASK)
    (here / "slow.yaml").write_text(json.dumps(RECIPE))
    assert run(["submit", "slow.yaml", "--address", NOBODY]) == 2
    assert "warning: task.name: slow_task is here but not sent; send its folder with --working-dir ." in (
        capfd.readouterr().err
    )
    shutil.move("slow_task.py", "elsewhere.py")
    assert run(["submit", "slow.yaml", "--address", NOBODY]) == 2
    assert "warning" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("exit_code", "message", "is_hinted"),
    [
        (127, "sh: 1: python: not found", True),
        (1, "/usr/bin/python: No module named shoal", True),
        (1, "ModuleNotFoundError: No module named 'shoal'", True),
        (1, "error: task.name: no module named 'my_task'", False),
        (2, "", False),
    ],
)
def test_a_cluster_without_shoal_is_told_from_a_run_that_fails(exit_code: int, message: str, is_hinted: bool) -> None:
    hint = _hint(State("job", "failed", exit_code, message, None))
    assert (hint is not None) is is_hinted
