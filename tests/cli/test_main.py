"""The `shoal` command as a whole: help, version, exit statuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.main import main, run
from shoal.core.version import VERSION
from tests.tiny import own_recipe, write_own_task, write_tiny

COMMANDS = (
    *("train", "tune", "plan", "submit", "deploy", "doctor", "runs", "report", "monitor", "track", "metrics"),
    *("checkpoints", "data", "drill", "bench", "completion"),
)
SHOAL = Path(sys.executable).with_name("shoal")
Capture = pytest.CaptureFixture[str]


def test_help_lists_every_command(capfd: Capture) -> None:
    assert run(["--help"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert all(f"\n  {command} " in out for command in COMMANDS)
    assert run(["-h"]) == 0
    assert capfd.readouterr().out == out


@pytest.mark.parametrize(
    "command",
    [
        *COMMANDS,
        *("runs list", "runs show", "runs compare", "checkpoints list", "bench step", "bench data"),
    ],
)
def test_every_command_explains_itself(command: str, capfd: Capture) -> None:
    assert run([*command.split(), "--help"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith(f"Usage: shoal {command} ") and err == ""
    assert len(out.splitlines()) > 4


def test_the_version_is_told(capfd: Capture) -> None:
    assert run(["--version"]) == 0
    assert capfd.readouterr().out == f"shoal, version {VERSION}\n"


def test_without_a_command_the_help_is_shown(capfd: Capture) -> None:
    assert run([]) == 2
    out, err = capfd.readouterr()
    assert "Usage: shoal" in out + err and "train" in out + err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("trian", f"No such command; allowed: {', '.join(sorted(COMMANDS))}; did you mean train?"),
        ("train --nonsense", "No such option"),
        ("train --launcher slurm", "'slurm' is not one of"),
        ("runs show", "Missing argument 'RUN'"),
        ("completion tcsh", "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        ("bench step --rounds 0", "--rounds"),
        ("train digts", "did you mean digits?"),
    ],
)
def test_wrong_arguments_are_status_2_and_words_on_stderr(
    here: Path, arguments: str, says: str, capfd: Capture
) -> None:
    assert run(arguments.split()) == 2
    out, err = capfd.readouterr()
    assert out == "" and says in err and "Traceback" not in err
    assert err.startswith("error: ") and err.count("\n") == 1, "one line"
    assert list(here.iterdir()) == []


def test_each_line_of_a_message_is_marked_as_an_error(here: Path, capfd: Capture) -> None:
    assert run(["train", "digits", "optim.lr=-1", "train.steps=x"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") for line in lines)


def test_a_run_that_fails_is_status_1_and_tells_how_to_go_on(here: Path, capfd: Capture) -> None:
    write_tiny(here, optim={"name": "sgd", "lr": 1e30}, checkpoint={"every_steps": 1})
    assert run(["train", "tiny.yaml", "--run-dir", "out"]) == 1
    err = capfd.readouterr().err
    assert "Traceback" not in err and "error: " in err and "lower optim.lr" in err


def test_an_error_in_the_users_own_code_is_status_1_with_its_traceback(here: Path, capfd: Capture) -> None:
    import json

    write_own_task(here, "task_of_main_error", "step == 5 and [][0]")
    (here / "own.yaml").write_text(json.dumps(own_recipe("task_of_main_error")))
    assert run(["train", "own.yaml"]) == 1
    err = capfd.readouterr().err
    assert "task_of_main_error.py" in err and "IndexError: list index out of range" in err
    assert err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["train", "digts"], 2)])
def test_the_status_becomes_that_of_the_process(here: Path, arguments: list[str], status: int, capfd: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == status


def test_the_installed_command_and_the_module_are_the_same(here: Path) -> None:
    for command in ([SHOAL], [sys.executable, "-m", "shoal.cli.main"]):
        ended = subprocess.run([*command, "train", "digts"], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2 and ended.stdout == ""
        assert ended.stderr.startswith("error: recipe 'digts'")


def test_a_reader_who_has_seen_enough_is_no_error(here: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([SHOAL, "train", "--list"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert ended.returncode == 0
    assert ended.stderr == ""
