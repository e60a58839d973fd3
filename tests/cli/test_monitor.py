"""`shoal monitor`: on a real terminal beside a real training, and for scripts."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.cli.main import run
from tests.made_run import make_run
from tests.terminal import Terminal, terminal
from tests.tiny import TINY

SHOAL = Path(sys.executable).with_name("shoal")
ENTERS, LEAVES, HOME = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H"
Capture = pytest.CaptureFixture[str]


def wait_for(what: Callable[[], object], timeout_s: float = 90.0) -> None:
    until = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)


# ---------------------------------------------------------------- a training beside it


@contextlib.contextmanager
def training(folder: Path, environment: dict[str, str]) -> Iterator[Path]:
    """A run that would take hours, in a process group of its own; its folder once it makes steps."""
    recipe = TINY | {"train": {"steps": 10_000_000, "global_batch": 16}, "checkpoint": {"every_steps": 2000}}
    recipe |= {"evaluate": {"every_steps": 500}, "observe": {"every_steps": 100, "workers_every_s": 1.0}}
    (folder / "tiny.yaml").write_text(json.dumps(recipe))
    run_dir = folder / "runs" / "tiny-live"
    command = [str(SHOAL), "train", "tiny.yaml", "--launcher", "local", "--run-dir", str(run_dir)]
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        file = run_dir / "metrics.jsonl"
        wait_for(lambda: process.poll() is not None or (file.exists() and len(file.read_text().splitlines()) > 5))
        assert process.poll() is None
        yield run_dir
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    with training(tmp_path_factory.mktemp("live"), environment) as run_dir:
        yield run_dir


class Monitor:
    """`shoal monitor` as a person starts it: the terminal is its own, so that Ctrl-C reaches it."""

    def __init__(self, screen: Terminal, where: Path, *arguments: str, **environment: str) -> None:
        self.screen = screen
        self.modes = termios.tcgetattr(screen.slave)
        self.resize(100, 30)
        dropped = ("NO_COLOR", "LC_ALL", "COLUMNS", "LINES", "CI")
        variables = {name: value for name, value in os.environ.items() if name not in dropped}
        variables |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"} | environment
        self.process = subprocess.Popen(
            [str(SHOAL), "monitor", *arguments],
            **dict.fromkeys(("stdin", "stdout", "stderr"), screen.slave),  # type: ignore[call-overload]
            cwd=where,
            env=variables,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.screen.slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self.screen.master, keys)

    @property
    def shown(self) -> str:
        return bytes(self.screen._shown).decode(errors="replace")

    def frames(self) -> list[str]:
        """What was drawn in place, without colours."""
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part) for part in self.shown.split(HOME)[1:]]

    def wait_for(self, words: str) -> str:
        wait_for(lambda: any(words in part for part in self.frames()[-2:]) or self.process.poll() is not None)
        found = [part for part in self.frames() if words in part]
        assert found, self.shown[-3000:]
        return found[-1]

    def ends(self) -> str:
        """What is left on the screen after a good end, with the terminal as it was."""
        assert self.process.wait(timeout=60) == 0, self.shown[-3000:]
        wait_for(lambda: LEAVES in self.shown)
        assert termios.tcgetattr(self.screen.slave) == self.modes
        after = self.shown.rpartition(LEAVES)[2]
        assert "\x1b[?25h" in self.shown.rpartition("\x1b[?25l")[2]  # the cursor is back
        assert "Traceback" not in self.shown
        return after


@contextlib.contextmanager
def monitor(where: Path, *arguments: str, **environment: str) -> Iterator[Monitor]:
    with terminal() as screen:
        watching = Monitor(screen, where, *arguments, **environment)
        try:
            yield watching
        finally:
            if watching.process.poll() is None:
                watching.process.kill()
                watching.process.wait()


def step_in(shown: str) -> int:
    found = re.search(r"step ([\d,]+)/10,000,000", shown)
    return int(found.group(1).replace(",", "")) if found else -1


def test_a_running_training_is_shown_as_it_goes_until_q_is_pressed(live: Path) -> None:
    with monitor(live.parents[1]) as watching:  # no run named: the one that runs
        first = step_in(watching.wait_for("step "))
        wait_for(lambda: step_in(watching.frames()[-1]) > first)
        shown = watching.wait_for("where its time goes")
        for words in (
            "tiny-live  running",
            "single · 1 worker · cpu",
            "left",
            "verdict ",
            "samples/s now",
            "train_loss",
        ):
            assert words in shown
        assert all(len(line) <= 100 for line in shown.split("\r\n"))
        watching.press(b"q")
        assert watching.ends().strip() == ""  # nothing stays behind


def test_ctrl_c_leaves_it_too(live: Path) -> None:
    with monitor(live.parents[1], "tiny-live") as watching:
        watching.wait_for("running")
        watching.press(b"\x03")
        assert "interrupted" not in watching.ends()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_the_terminal_as_it_was(live: Path, number: int) -> None:
    with monitor(live.parents[1], "tiny-live") as watching:
        watching.wait_for("running")
        watching.process.send_signal(number)
        watching.ends()


def test_it_can_be_suspended(live: Path) -> None:
    with monitor(live.parents[1], "tiny-live") as watching:
        watching.wait_for("running")
        watching.process.send_signal(signal.SIGTSTP)
        wait_for(lambda: Path(f"/proc/{watching.process.pid}/stat").read_text().rpartition(") ")[2][0] == "T")
        wait_for(lambda: watching.shown.endswith(LEAVES))
        assert termios.tcgetattr(watching.screen.slave) == watching.modes
        watching.process.send_signal(signal.SIGCONT)
        wait_for(lambda: watching.shown.count(ENTERS) == 2 and watching.shown.rpartition(ENTERS)[2].count(HOME) > 1)
        watching.press(b"q")
        watching.ends()


def test_another_size_is_taken_at_once(live: Path) -> None:
    with monitor(live.parents[1], "tiny-live") as watching:
        watching.wait_for("running")
        for width, height in ((60, 12), (200, 60), (80, 24), (20, 5)):
            watching.resize(width, height)
            wait_for(lambda size=(width, height): frame_size(watching.frames()[-1]) == size)  # type: ignore[misc]
        watching.press(b"q")
        watching.ends()


def frame_size(shown: str) -> tuple[int, int]:
    lines = shown.split("\r\n")
    return len(lines[0]), len(lines)


def test_without_colours_there_are_none(live: Path) -> None:
    with monitor(live.parents[1], "tiny-live", NO_COLOR="1") as watching:
        shown = watching.wait_for("where its time goes")
        assert re.search(r"f{4,}", shown) or re.search(r"b{4,}", shown)  # phases by letters
        watching.press(b"q")
        watching.ends()
        assert not re.search(r"\x1b\[(?:\d+;)*(?:3[0-7]|4[0-7]|38|48|9[0-7])[;m]", watching.shown)


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_where_there_is_only_ascii_there_is_nothing_else(live: Path, locale: dict[str, str]) -> None:
    with monitor(live.parents[1], "tiny-live", **locale) as watching:
        watching.wait_for("train_loss")
        watching.press(b"q")
        watching.ends()
        assert watching.shown.isascii()


@pytest.mark.slow
def test_a_training_that_is_killed_is_told_of_and_what_was_seen_stays(
    tmp_path: Path, without_coverage: dict[str, str]
) -> None:
    with training(tmp_path, without_coverage) as run_dir, monitor(tmp_path) as watching:
        watching.wait_for("running")
        workers = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        for worker in next(event for event in workers if event["event"] == "workers")["workers"]:
            os.kill(worker["pid"], signal.SIGKILL)
        left = watching.ends()
        assert "without a word, and nobody trains there now; go on with: shoal train --resume" in left
        assert "tiny-live" in left and "train_loss" in left


@pytest.mark.slow
def test_a_training_that_ends_is_told_of_and_what_was_seen_stays(
    tmp_path: Path, without_coverage: dict[str, str]
) -> None:
    with training(tmp_path, without_coverage) as run_dir, monitor(tmp_path) as watching:
        watching.wait_for("running")
        workers = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        pids = [worker["pid"] for event in workers if event["event"] == "workers" for worker in event["workers"]]
        os.kill(pids[0], signal.SIGINT)
        left = watching.ends()
        assert re.search(r"interrupted at step [\d,]+; go on with: shoal train --resume", left)
        assert "train_loss" in left


# ---------------------------------------------------------------- ended runs on a terminal


def test_of_a_run_that_has_ended_the_frame_stays(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "digits-a")
    with monitor(tmp_path) as watching:
        left = watching.ends()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", left)
    assert "digits-a  done" in plain and "done: 400 steps in 1 min 02 s" in plain
    assert len(plain.splitlines()) <= 30


def test_a_folder_that_goes_away_is_told_of(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "digits-a", steps=200, ended=None, fails_at=None)
    with monitor(tmp_path) as watching:
        watching.wait_for("digits-a")
        shutil.rmtree(folder)
        assert "the run's folder is gone" in watching.ends()


# ---------------------------------------------------------------- elsewhere


def test_without_a_terminal_there_is_one_frame(here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    make_run(here / "runs" / "digits-a")
    for arguments in (["monitor"], ["monitor", "digits", "--once"], ["monitor", "--root", "runs", "digits-a"]):
        assert run(arguments) == 0
        out, err = capfd.readouterr()
        assert out.startswith("digits-a  done") and "\x1b" not in out and err == ""
        assert "done: 400 steps" in out.splitlines()[-1] and len(out.splitlines()) <= 24


def test_json_is_one_object(here: Path, capfd: Capture) -> None:
    make_run(here / "runs" / "digits-a", steps=300, ended=None)
    assert run(["monitor", "--json"]) == 0
    out, err = capfd.readouterr()
    facts = json.loads(out)
    assert err == "" and out.count("\n") == 1
    assert (facts["run"], facts["step"], facts["num_steps"], facts["bottleneck"]) == ("digits-a", 300, 400, "compute")
    assert facts["last_checkpoint"]["step"] == 300 and facts["failures"][0]["rank"] == 1 and facts["goodput"] > 0.3


def test_no_runs_is_one_line_that_says_how_to_start_one(here: Path, capfd: Capture) -> None:
    (here / "empty").mkdir()
    for arguments in (["monitor"], ["monitor", "--json"], ["monitor", "--root", "empty"]):
        assert run(arguments) == 0
        out, err = capfd.readouterr()
        assert out == "" and err.startswith("no runs in ") and err.endswith("; start one with: shoal train\n")


def test_a_wrong_run_is_told(here: Path, capfd: Capture) -> None:
    make_run(here / "runs" / "digits-a")
    assert run(["monitor", "digist-a"]) == 2
    assert capfd.readouterr().err == "error: run 'digist-a': not found; did you mean digits-a?\n"


def test_it_loads_without_torch(here: Path) -> None:
    make_run(here / "runs" / "digits-a")
    code = (
        "import sys; from shoal.cli.main import run; assert run(['monitor']) == 0; "
        "assert not {'torch', 'ray', 'numpy'} & set(sys.modules), sorted({'torch', 'ray', 'numpy'} & set(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=here, capture_output=True)
