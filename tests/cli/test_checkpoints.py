"""`shoal checkpoints`: what is saved of a run."""

import json
import shutil
import time
from pathlib import Path

import pytest

from shoal.cli.main import run
from tests.tiny import tiny_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    tiny_run(folder / "runs" / "tiny-[red]", {"checkpoint.every_steps": 3, "checkpoint.keep_last": 3})
    return folder


@pytest.fixture
def copy(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained / "runs", "runs")) / "tiny-[red]" / "checkpoints"


def test_checkpoints_are_listed_oldest_first(copy: Path, capfd: Capture) -> None:
    assert run(["checkpoints", "list", "tiny"]) == 0
    out, err = capfd.readouterr()
    header, *rows = out.splitlines()
    assert header.split() == ["step", "epoch", "size", "metrics", "saved", "path"] and err == ""
    assert [row.split()[:2] for row in rows] == [["6", "1"], ["9", "1"], ["12", "2"]]
    assert ["val_accuracy" in row and "val_loss" in row for row in rows] == [True, False, True]
    for row, step in zip(rows, (6, 9, 12), strict=True):
        assert row.rstrip().endswith(f" ago  runs/tiny-[red]/checkpoints/step-{step:08d}")


def test_checkpoints_are_listed_as_one_json_object_each(copy: Path, capfd: Capture) -> None:
    assert run(["checkpoints", "list", "tiny", "--json"]) == 0
    out, err = capfd.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["step"] for row in rows] == [6, 9, 12] and err == ""
    final = json.loads(Path("runs/tiny-[red]/summary.json").read_text())["metrics"]
    assert rows[-1]["metrics"] == {name: final[name] for name in ("val_loss", "val_accuracy")}
    for row in rows:
        files = [file for file in Path(row["path"]).iterdir() if file.name != "manifest.json"]
        assert row["bytes"] == sum(file.stat().st_size for file in files)
        assert 0 <= time.time() - row["time"] < 600


def test_what_is_not_whole_is_not_listed(copy: Path, capfd: Capture) -> None:
    (copy / "step-00000009" / "manifest.json").write_text('{"step": 9, "ep')
    (copy / "step-00000006" / "manifest.json").unlink()
    (copy / ".writing-step-00000015-77").mkdir()
    (copy / "step-00000099").write_text("a file")
    assert run(["checkpoints", "list", "tiny", "--json"]) == 0
    assert [json.loads(line)["step"] for line in capfd.readouterr().out.splitlines()] == [12]


def test_a_run_without_checkpoints_is_told_so(copy: Path, capfd: Capture) -> None:
    shutil.rmtree(copy)
    assert run(["checkpoints", "list", "tiny"]) == 0
    out, err = capfd.readouterr()
    assert out == "" and err == "no checkpoints in runs/tiny-[red]/checkpoints\n"
    assert run(["checkpoints", "list", "tiny", "--json"]) == 0
    assert capfd.readouterr() == ("", "")
