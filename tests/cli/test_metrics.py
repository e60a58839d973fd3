"""`shoal metrics`."""

from pathlib import Path

import pytest

from shoal.cli.main import run
from shoal.observe.prometheus.shipped_files import shipped_files
from tests.made_run import make_run


def test_files_are_written_once_and_not_over_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "monitoring" / "shoal"
    assert run(["metrics", "files", str(target)]) == 0
    assert capsys.readouterr().out.split() == [str(target / name) for name in shipped_files()]
    for name, path in shipped_files().items():
        assert (target / name).read_bytes() == path.read_bytes()
    assert run(["metrics", "files", str(target)]) == 0
    (target / "alerts.yml").write_text("my own")
    capsys.readouterr()
    assert run(["metrics", "files", str(target)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: metrics files: alerts.yml in ") and "--force" in error
    assert (target / "alerts.yml").read_text() == "my own"
    assert run(["metrics", "files", str(target), "--force"]) == 0
    assert (target / "alerts.yml").read_bytes() == shipped_files()["alerts.yml"].read_bytes()


def test_a_place_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["metrics", "files", "/proc/x"]) == 2
    assert capsys.readouterr().err == "error: metrics files: /proc/x cannot be written: No such file or directory\n"


def test_a_run_is_shown_from_its_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(here / "runs" / "digits-1")
    assert run(["metrics", "show", "digits"]) == 0
    out = capsys.readouterr().out
    assert 'shoal_run_step{run="digits-1"} 400.0\n' in out and out.endswith("\n") and not out.endswith("\n\n")


def test_a_run_that_is_not_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["metrics", "show", "nothing"]) == 2
    assert "not found" in capsys.readouterr().err


def test_a_target_that_is_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "x").write_text("")
    assert run(["metrics", "files", "x"]) == 2
    assert "Traceback" not in capsys.readouterr().err
