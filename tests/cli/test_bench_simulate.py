"""`shoal bench simulate` as it is typed: what it prints, writes and refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import run
from tests.tiny import TINY, tiny_run, write_tiny

Capture = pytest.CaptureFixture[str]


def test_a_given_step_gives_a_table_json_and_a_plot(here: Path, capfd: Capture) -> None:
    words = ["--step-ms", "100", "--network", "nvlink+100gbe", "--max-gpus", "64", "--only", "ddp,fsdp", "-o", "out"]
    assert run(["bench", "simulate", *words]) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == ["GPUs", "ddp", "eff.", "exposed", "fsdp", "eff.", "exposed"]
    assert [line.split()[0] for line in lines[1:8]] == ["1", "2", "4", "8", "16", "32", "64"]
    assert "given: 100 ms, of which the forward pass is taken for a third" in out and "nvlink+100gbe, 8 GPUs" in out
    assert "written to out/simulate-small_vit-" in err
    written = sorted((here / "out").iterdir())
    assert [path.suffix for path in written] == [".json", ".png"]
    kept = json.loads(written[0].read_text())
    assert kept["benchmark"] == "simulate-small_vit" and kept["rows"][-1]["gpus"] == 64 and kept["machine"]["torch"]


def test_json_is_one_line_and_figures_can_be_others(here: Path, capfd: Capture) -> None:
    words = ["--step-ms", "1,2,3", "--json", "--gpus-per-node", "4", "--max-gpus", "8", "--between-us", "2.5"]
    assert run(["bench", "simulate", *words]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [row["gpus"] for row in found["rows"]] == [1, 2, 4, 8]
    assert found["network"]["between_us"] == 2.5 and found["network"]["name"] == "nvlink+ib with changes"
    assert found["phases_ms"] == pytest.approx({"forward": 1, "backward": 2, "optimizer": 3})


def test_a_step_from_a_run_of_one_worker(here: Path, capfd: Capture) -> None:
    write_tiny(here)
    tiny_run(here / "ran", {"train.steps": 120, "observe.every_steps": 10, "evaluate.every_steps": 120})
    words = ["tiny.yaml", "--step-from", "ran", "--only", "ddp", "--max-gpus", "2", "--json"]
    assert run(["bench", "simulate", *words]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["step"].startswith("measured by run ran on ") and found["step_ms"] > 0
    assert all(value > 0 for value in found["phases_ms"].values())


def test_a_step_from_a_result_of_bench_step(here: Path, capfd: Capture) -> None:
    (here / "step.json").write_text(json.dumps({"shoal_step_ms": 30.0, "machine": {"device": "NVIDIA H200"}}))
    assert run(["bench", "simulate", "--step-from", "step.json", "--only", "ddp", "--max-gpus", "2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["step_ms"] == pytest.approx(30) and "step.json on NVIDIA H200" in found["step"]


def test_a_run_of_several_workers_is_no_measure(here: Path, capfd: Capture, made: Callable[..., Path]) -> None:
    made(here / "two", 2)
    assert run(["bench", "simulate", "--step-from", "two"]) == 2
    assert "--step-from: run 'two' had several workers, who waited for each other" in capfd.readouterr().err


@pytest.fixture
def made() -> Callable[..., Path]:
    """A run's folder as far as it is looked at."""

    def make(folder: Path, world_size: int) -> Path:
        folder.mkdir()
        (folder / "recipe.yaml").write_text(json.dumps(TINY))
        event = {"time": 1.0, "event": "start", "world_size": world_size}
        (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
        return folder

    return make


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--network", "nvlink+1b"], "--network: 'nvlink+1b' is no network; allowed: "),
        (["--network", "none.yaml"], "--network: none.yaml cannot be read"),
        (["--between-gb-per-s", "0"], "--between-gb-per-s: 0.0 should be a number above 0"),
        (["--inside-us", "-1"], "--inside-us: -1.0 should be a number of 0 or more"),
        (["--inside-us", "nan"], "--inside-us: nan should be a number of 0 or more"),
        (["--step-ms", "fast"], "--step-ms: 'fast' should be the milliseconds of a step"),
        (["--step-ms", "1,2"], "--step-ms: '1,2' should be"),
        (["--step-ms", "0"], "--step-ms: '0' should be"),
        (["--step-ms", "-3"], "--step-ms: '-3' should be"),
        (["--step-ms", "nan"], "--step-ms: 'nan' should be"),
        (["--step-ms", "3", "--step-from", "x"], "--step-ms: and --step-from both say what a step takes"),
        (["--step-from", "nowhere"], "run 'nowhere': not found"),
        (["--step-from", "other.json"], "--step-from: other.json is no result of shoal bench step"),
        (["--step-from", "zero.json"], "--step-from: zero.json tells of steps of 0 ms"),
        (["--step-ms", "3", "--only", "dpp"], "--only: 'dpp' is not measured here; allowed: "),
        (["--gpus-per-node", "0"], "--gpus-per-node"),
        (["--max-gpus", "0"], "--max-gpus"),
        (["--rounds", "3"], "--rounds: is for --check; add that, or leave it out"),
        (["--workers", "2"], "--workers: is for --check"),
        (["--check", "--workers", "3"], "--workers: '3' is not checked; allowed: 2, 4"),
        (["--check", "--workers", "2", "--only", "hsdp"], "--only: hsdp takes 4 workers"),
        (["--check", "--only", "zero1"], "--only: 'zero1' is not measured here"),
        (
            ["--check", "--network", "nvlink+ib"],
            "--network: --check measures the network and the steps of this machine",
        ),
        (["--check", "--max-gpus", "8"], "--max-gpus: --check measures"),
        (["--check", "--step-ms", "8"], "--step-ms: --check measures"),
        (["--check", "parallel.backend=nccl"], "--check: runs on CPUs"),
        (["optim.lr=-1"], "optim.lr"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_measured(
    words: list[str], message: str, here: Path, capfd: Capture
) -> None:
    (here / "other.json").write_text("{}")
    (here / "zero.json").write_text(json.dumps({"shoal_step_ms": 0, "machine": {"device": "cpu"}}))
    assert run(["bench", "simulate", *words]) == 2
    out, err = capfd.readouterr()
    assert message in err and "Traceback" not in err and out == ""
    assert sorted(path.name for path in here.iterdir()) == ["other.json", "zero.json"]


@pytest.mark.alone
def test_a_check_ends_with_status_1_where_it_is_off(here: Path, capfd: Capture) -> None:
    """Whether it is, of steps of two milliseconds, nobody knows; the status says so either way."""
    write_tiny(here)
    words = [
        "tiny.yaml",
        "--check",
        "--workers",
        "2",
        "--only",
        "ddp",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--json",
        "-o",
        "out",
    ]
    status = run(["bench", "simulate", *words])
    out, err = capfd.readouterr()
    found: dict[str, Any] = json.loads(out)
    (row,) = found["checks"]
    assert status == (0 if row["ok"] else 1) and ("all within 15%" in err) == row["ok"]
    assert [path.name.split("-")[1] for path in sorted((here / "out").iterdir())] == ["check", "check"]
