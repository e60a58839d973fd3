"""`shoal doctor`: what it prints and how it ends."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.main import run
from tests.terminal import terminal

SHOAL = Path(sys.executable).with_name("shoal")
Capture = pytest.CaptureFixture[str]


def test_the_machine_that_runs_the_tests_is_well(here: Path, capsys: Capture) -> None:
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "this machine" and any(line.startswith("  + pass python ") for line in lines)
    assert "passed" in lines[-1] and " 0 failed" in lines[-1]
    assert list(here.iterdir()) == []


def test_json_is_the_last_line_and_all_else_goes_to_stderr(here: Path, capsys: Capture) -> None:
    assert run(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    record = json.loads(line)
    assert record["status"] in ("pass", "warn")
    assert set(record["checks"][0]) == {"check", "level", "found", "advice", "group", "node"}
    assert "python" in captured.err


def test_something_that_fails_is_status_1(here: Path, capsys: Capture) -> None:
    assert run(["doctor", "--json", "--storage", "not-mounted"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["status"] == "fail"
    (failed,) = [one for one in record["checks"] if one["level"] == "fail"]
    assert failed["check"] == "storage" and str(here / "not-mounted") in failed["found"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--address", "http://head:8265"], "--address: 'http://head:8265' should be auto, HOST:PORT"),
        (["--address", "head"], "--address: 'head' should be"),
        (["--storage", "s3://bucket"], "--storage: 's3://bucket' should be a folder"),
        (["--storage", ""], "--storage: ''"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_wrong_input_is_status_2(arguments: list[str], words: str, here: Path, capsys: Capture) -> None:
    assert run(["doctor", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["file", "file/runs"])
def test_a_file_is_no_storage(name: str, here: Path, capsys: Capture) -> None:
    (here / "file").write_text("")
    assert run(["doctor", "--storage", name]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: --storage: '{name}' should be a folder, and is a file or lies in one\n"
    assert captured.out == ""


def test_on_a_cluster_storage_is_of_its_machines(here: Path, capsys: Capture) -> None:
    (here / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    assert run(["doctor", "--address", address, "--storage", "file"]) == 1
    assert "no Ray cluster answers" in capsys.readouterr().out


def test_a_cluster_that_does_not_answer_is_a_finding(here: Path, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert run(["doctor", "--address", f"127.0.0.1:{port}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cluster" and f"no Ray cluster answers at '127.0.0.1:{port}' (Connection refused)" in lines[1]
    assert lines[2].strip() == "> start one with ray start --head"


def test_on_a_terminal_there_are_symbols_and_progress(here: Path) -> None:
    with terminal() as screen:
        command = [str(SHOAL), "doctor"]
        environment = dict(os.environ) | {"TERM": "xterm-256color", "NO_COLOR": "1"}
        status = subprocess.run(
            command, stdout=screen.slave, stderr=screen.slave, env=environment, check=False
        ).returncode
        shown = screen.close()
    assert status == 0
    assert "✓ pass python" in shown and "... looking at this machine" in shown


def test_a_user_without_name_home_or_rights(tmp_path: Path) -> None:
    """As in a container that is run as any user: told, and nothing breaks."""
    if os.getuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv"))):
        pytest.skip("only root may become another user, by unshare and setpriv")
    checkout = Path(__file__).parents[2]
    if any(not folder.stat().st_mode & 0o001 for folder in (checkout, *checkout.parents)):
        pytest.skip("another user may not read this checkout")
    python = Path(sys.base_prefix)
    closed = next((folder for folder in reversed(python.parents) if not folder.stat().st_mode & 0o001), None)
    script = "cd / && setpriv --reuid 4242 --regid 4242 --clear-groups env -i PATH=/usr/bin:/bin " + shlex.join(
        [sys.executable, "-m", "shoal.cli.main", "doctor", "--json"]
    )
    if closed is not None:  # this Python lies in a folder of root's: for that user it is all that the folder holds
        inside = tmp_path / "open"
        (inside / python.relative_to(closed)).mkdir(parents=True)
        inside.chmod(0o755)
        bind = ["mount", "--bind", str(python), str(inside / python.relative_to(closed))]
        script = f"{shlex.join(bind)} && {shlex.join(['mount', '--rbind', str(inside), str(closed)])} && {script}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip("this machine allows no mounts")
    record = json.loads(done.stdout.splitlines()[-1])
    found = {one["check"]: one for one in record["checks"]}
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert found["run folder"]["level"] == "warn" and found["run folder"]["advice"].endswith("--run-dir DIR")
    assert found["cache folder"]["level"] == "warn" and "XDG_CACHE_HOME" in found["cache folder"]["advice"]
    assert found["user"]["level"] == "warn" and found["user"]["found"] == "no name (uid 4242), home unknown"
    assert found["imports"]["level"] == "pass"


def test_help_says_what_the_statuses_mean(capsys: Capture) -> None:
    assert run(["doctor", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--storage" in out and "Status: 0 nothing failed, 1 something failed" in out
