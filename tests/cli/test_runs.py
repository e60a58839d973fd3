"""`shoal runs`: list, show, compare; for people and for scripts; whatever lies in the folders."""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.main import run
from shoal.cli.run_tables import sparkline
from shoal.core.errors import RunError
from shoal.observe.report.compare_data import compare_data
from shoal.observe.report.folder import read_folder
from tests.tiny import tiny_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two runs have ended well and one has not."""
    folder = tmp_path_factory.mktemp("two")
    tiny_run(folder / "runs" / "tiny-20260101-aaaa")
    tiny_run(folder / "runs" / "tiny-20260102-bbbb", {"optim.lr": 0.05, "model.hidden": [4], "train.steps": 8})
    with pytest.raises(RunError):
        tiny_run(folder / "runs" / "wild-20260103-cccc", {"optim.name": "sgd", "optim.lr": 1e30})
    return folder


@pytest.fixture
def there(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory is where they are."""
    monkeypatch.chdir(two_runs)
    return two_runs


@pytest.fixture
def copy(two_runs: Path, here: Path) -> Path:
    """The first of them, to break, in a working directory of its own."""
    source = two_runs / "runs" / "tiny-20260101-aaaa"
    return Path(shutil.copytree(source, here / "runs" / "tiny-20260101-aaaa"))


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


# ---------------------------------------------------------------- list


@pytest.mark.parametrize("arguments", [["runs"], ["runs", "list"]])
def test_runs_are_listed_one_a_line_oldest_first(there: Path, arguments: list[str], capfd: Capture) -> None:
    assert run(arguments) == 0
    out, err = capfd.readouterr()
    header, *rows = out.splitlines()
    assert header.split() == ["run", "status", "step", "workers", "restarts", "metrics", "started"] and err == ""
    assert [row.split()[:5] for row in rows] == [
        ["tiny-20260101-aaaa", "done", "12", "1", "0"],
        ["tiny-20260102-bbbb", "done", "8", "1", "0"],
        ["wild-20260103-cccc", "failed", rows[2].split()[2], "1", "0"],
    ]
    metrics = summary_of(Path("runs/tiny-20260101-aaaa"))["metrics"]
    assert f"train_loss {metrics['train_loss']:.4f}  val_accuracy {metrics['val_accuracy']:.2%}" in rows[0]
    assert rows[0].rstrip().endswith("ago")


def test_runs_are_listed_as_one_json_object_each(there: Path, capfd: Capture) -> None:
    assert run(["runs", "list", "--json"]) == 0
    out, err = capfd.readouterr()
    listed = [json.loads(line) for line in out.splitlines()]
    assert [(item["run"], item["status"]) for item in listed] == [
        ("tiny-20260101-aaaa", "done"),
        ("tiny-20260102-bbbb", "done"),
        ("wild-20260103-cccc", "failed"),
    ]
    for item in listed:
        folder = Path(item["run_dir"])
        assert item["summary"] == summary_of(folder) and item["metrics"] == item["summary"]["metrics"]
        assert item["step"] == item["summary"]["step"] and abs(item["started"] - time.time()) < 600
    assert err == ""


def test_runs_elsewhere_are_listed_by_their_root(two_runs: Path, here: Path, capfd: Capture) -> None:
    assert run(["runs", "list", "--root", str(two_runs / "runs")]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 4


def test_runs_elsewhere_are_shown_and_compared_by_their_root(two_runs: Path, here: Path, capfd: Capture) -> None:
    root = ["--root", str(two_runs / "runs")]
    assert run(["runs", "show", "tiny-20260101", *root]) == 0
    assert capfd.readouterr().out.startswith(f"{two_runs}/runs/tiny-20260101-aaaa  done, step 12, ")
    assert run(["runs", "compare", "tiny-20260101", "tiny-20260102", *root, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["recipe"]["optim.lr"] == [0.01, 0.05]
    assert run(["runs", "show", "zzzz", *root]) == 2
    assert f"see shoal runs list --root {two_runs}/runs for the 3 in" in capfd.readouterr().err


def test_workers_and_restarts_are_told_everywhere(copy: Path, capfd: Capture) -> None:
    events = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    start = next(event for event in events if event["event"] == "start")
    restart = {"time": start["time"], "event": "restart", "restarts": 1, "from_step": None}
    events[2:2] = [restart, start | {"world_size": 3}]
    (copy / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert run(["runs", "list"]) == 0
    assert capfd.readouterr().out.splitlines()[1].split()[:5] == [copy.name, "done", "12", "3", "1"]
    assert run(["runs", "show", copy.name]) == 0
    assert "\n3 workers, 1 restart, last written " in capfd.readouterr().out
    assert run(["runs", "compare", copy.name, copy.name]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capfd.readouterr().out.splitlines()[1:]}
    assert (rows["workers"], rows["restarts"]) == (["3", "3"], ["1", "1"])
    assert run(["runs", "show", copy.name, "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert (shown["workers"], shown["restarts"]) == (3, 1) and abs(shown["written"] - time.time()) < 600


def test_where_nothing_has_run_that_is_said_on_stderr(here: Path, capfd: Capture) -> None:
    assert run(["runs", "list"]) == 0
    out, err = capfd.readouterr()
    assert out == "" and f"no runs in {here / 'runs'}; start one with: shoal train" in err
    assert run(["runs", "list", "--json"]) == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("command", ["runs list", "runs show x", "runs compare x y", "monitor", "report x"])
def test_a_root_that_is_not_there_is_wrong_input(here: Path, command: str, capfd: Capture) -> None:
    assert run([*command.split(), "--root", "nowhere"]) == 2
    assert capfd.readouterr() == ("", "error: --root: nowhere is not there; give a folder of runs\n")
    (here / "file").touch()
    assert run([*command.split(), "--root", "file"]) == 2
    assert "file is not a folder" in capfd.readouterr().err


# ---------------------------------------------------------------- show


@pytest.mark.parametrize(
    "name",
    ["tiny-20260101-aaaa", "tiny-20260101", "tiny-20260101-", "runs/tiny-20260101-aaaa", "./runs/tiny-20260101-aaaa/"],
)
def test_a_run_is_shown_by_name_beginning_or_path(there: Path, name: str, capfd: Capture) -> None:
    assert run(["runs", "show", name]) == 0
    out, _ = capfd.readouterr()
    assert out.startswith("runs/tiny-20260101-aaaa  done, step 12, started 20")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["metric"] == ["metric", "first", "last", "best", "curve"]
    metrics = summary_of(Path("runs/tiny-20260101-aaaa"))["metrics"]
    assert rows["train_loss"][2] == f"{metrics['train_loss']:.4f}"
    assert rows["val_accuracy"][2] == f"{metrics['val_accuracy']:.2%}"
    losses = [float(number) for number in rows["train_loss"][1:4]]
    assert losses[2] == min(losses), "of a loss, the best is the least"
    assert rows["samples_per_s"][3] == rows["lr"][3] == "-", "speeds and learning rates have no best"
    assert set(rows["train_loss"][4]) <= set("▁▂▃▄▅▆▇█") and len(rows["train_loss"][4]) == 7
    assert summary_of(Path("runs/tiny-20260101-aaaa"))["verdict"] in out
    assert re.search(r"\n\d\d:\d\d:\d\d  1 worker ready on cpu \(single\), at step 0 of 12\n", out)
    assert re.search(r"\n\d\d:\d\d:\d\d  step 12 saved\n", out) and "step 8 saved" not in out and "{" not in out


def test_a_run_shorter_than_the_time_between_two_lines_on_workers_has_one(there: Path) -> None:
    for name in ("tiny-20260101-aaaa", "wild-20260103-cccc"):
        folder = there / "runs" / name
        (line,) = [json.loads(line) for line in (folder / "workers.jsonl").read_text().splitlines()]
        assert line["seconds"].keys() >= {"start", "forward", "backward"} and line["system"]["memory_bytes"][0] > 0
        assert line["step"] == summary_of(folder)["step"] and line["bottleneck"]


def test_where_the_time_of_a_run_went_is_shown(there: Path, capfd: Capture) -> None:
    assert run(["runs", "show", "tiny-20260101"]) == 0
    out = capfd.readouterr().out
    parts = [part.splitlines() for part in out.split("\n\n")]
    assert parts[1][0].split() == ["where", "the", "time", "went", "of", "worker", "time", "worker", "time"]
    assert parts[1][1].startswith("training steps ") and parts[1][-1].startswith("all ") and "100.0%" in parts[1][-1]
    assert parts[2][0].split() == ["phase", "(mean", "of", "the", "workers)", "a", "step", "in", "all", "of", "these"]
    assert {line.split()[0] for line in parts[2][1:]} >= {"start", "data", "forward", "backward", "optimizer"}
    assert " of wall time, goodput " in parts[0][2] and " samples/s on average" in parts[0][2]
    assert "cost" not in out


def test_what_a_run_cost_is_shown_where_there_is_a_price(copy: Path, capfd: Capture) -> None:
    recipe = (copy / "recipe.yaml").read_text().replace("price_per_hour: null", "price_per_hour: 3600000.0")
    (copy / "recipe.yaml").write_text(recipe)
    assert run(["runs", "show", copy.name, "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["cost"] == shown["ledger"]["cost"]["total"]
    assert shown["cost"] == pytest.approx(1000 * shown["ledger"]["worker_s"], abs=1.0)
    assert run(["runs", "show", copy.name]) == 0
    out = capfd.readouterr().out
    assert f"cost {shown['cost']:,.2f}" in out.splitlines()[2]
    assert re.search(rf"\nall +100.0% .* {shown['cost']:,.2f}\n", out)
    assert run(["runs", "compare", copy.name, copy.name]) == 0
    assert re.search(rf"\ncost +{shown['cost']:,.2f} +{shown['cost']:,.2f} ", capfd.readouterr().out)


def test_a_run_is_shown_as_json(there: Path, capfd: Capture) -> None:
    assert run(["runs", "show", "tiny-20260101-aaaa", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["summary"] == summary_of(Path("runs/tiny-20260101-aaaa"))
    assert shown["status"] == "done" and shown["run_dir"] == "runs/tiny-20260101-aaaa"
    assert shown["ledger"]["goodput"] == shown["goodput"] and shown["ledger"]["seconds"]["useful"] > 0
    assert shown["bottleneck"] == shown["summary"]["bottleneck"] and shown["verdict"] == shown["summary"]["verdict"]
    assert {row["phase"] for row in shown["phases"]} >= {"start", "forward", "backward"}


def test_a_failed_run_is_shown_with_what_went_wrong(there: Path, capfd: Capture) -> None:
    assert run(["runs", "show", "wild"]) == 0
    out, _ = capfd.readouterr()
    assert "failed" in out.splitlines()[0] and "train loss became" in out


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("runs show tinny-20260101-aaaa", "did you mean tiny-20260101-aaaa?"),
        ("runs show tiny", "2 begin so, give more of the name: tiny-20260101-aaaa, tiny-20260102-bbbb"),
        ("runs show zzzz", "see shoal runs list for the 3 in runs"),
        ("runs show runs", "holds no recipe.yaml"),
        ("runs compare tiny-20260101-aaaa zzzz", "run 'zzzz': not found"),
        ("runs compare wild", "give at least two runs"),
        ("runs compare", "Missing argument 'RUN RUN ...'"),
        ("checkpoints list tinny-20260101-aaaa", "did you mean tiny-20260101-aaaa?"),
        ("train --resume tinny-20260101-aaaa", "did you mean tiny-20260101-aaaa?"),
    ],
)
def test_a_wrong_name_is_status_2_and_a_hint(there: Path, command: str, says: str, capfd: Capture) -> None:
    assert run(command.split()) == 2
    out, err = capfd.readouterr()
    assert out == "" and says in err and "Traceback" not in err


# ---------------------------------------------------------------- compare


def test_runs_are_compared_side_by_side(there: Path, capfd: Capture) -> None:
    assert run(["runs", "compare", "tiny-20260101", "tiny-20260102"]) == 0
    out, _ = capfd.readouterr()
    assert out.splitlines()[0].split() == ["tiny-20260101-aaaa", "tiny-20260102-bbbb"]
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:]}
    assert rows["status"] == ["done", "done"] and rows["step"] == ["12", "8"]
    assert rows["optim.lr"] == ["0.01", "0.05"] and rows["model.hidden"] == ["[8]", "[4]"]
    assert rows["train.steps"] == ["12", "8"]
    bottlenecks = [summary_of(Path("runs") / name)["bottleneck"] for name in out.splitlines()[0].split()]
    assert rows["bottleneck"] == bottlenecks and len(rows["wall"]) == 5 and rows["goodput"][0].endswith("%")
    assert "samples_per_s" not in rows, "the mean is told, not the last report's"
    assert "train.seed" not in rows and "optim.name" not in rows, "what is the same is not told"
    for run_number, name in enumerate(("tiny-20260101-aaaa", "tiny-20260102-bbbb")):
        value, curve = rows["val_loss"][2 * run_number : 2 * run_number + 2]
        assert value == f"{summary_of(Path('runs') / name)['metrics']['val_loss']:.4f}"
        assert set(curve) <= set("▁▂▃▄▅▆▇█")


def test_a_metric_that_only_one_run_has_is_a_dash_for_the_other(there: Path, capfd: Capture) -> None:
    assert run(["runs", "compare", "tiny-20260101", "wild"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capfd.readouterr().out.splitlines()[1:]}
    assert rows["val_loss"][-1] == "-"


def test_a_comparison_is_one_json_object(there: Path, capfd: Capture) -> None:
    assert run(["runs", "compare", "tiny-20260101", "tiny-20260102", "wild", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [item["run"] for item in found["runs"]] == ["tiny-20260101-aaaa", "tiny-20260102-bbbb", "wild-20260103-cccc"]
    assert found["recipe"]["optim.lr"] == [0.01, 0.05, 1e30]
    assert found["recipe"]["optim.name"] == ["adamw", "adamw", "sgd"]
    for item in found["runs"][:2]:
        assert item["samples_per_s"] == item["summary"]["samples_per_s"] and item["wall_s"] >= 0
        assert 0 < item["goodput"] <= 1 and item["cost"] is None and item["bottleneck"] == item["summary"]["bottleneck"]
    assert found["recipe"].keys() == {"optim.lr", "optim.name", "model.hidden", "train.steps"}


def test_the_terminal_and_the_page_tell_the_same(there: Path, capfd: Capture) -> None:
    folders = [read_folder(there / "runs" / name) for name in ("tiny-20260101-aaaa", "wild-20260103-cccc")]
    page = {row["label"]: row["values"] for row in compare_data(folders)["outcome"]}
    assert run(["runs", "compare", "tiny-20260101", "wild"]) == 0
    labels = [line.partition("  ")[0] for line in capfd.readouterr().out.splitlines()[1:]]
    assert labels[: len(page)] == list(page)
    assert run(["runs", "compare", "tiny-20260101", "wild", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)["runs"]
    for label, name in {"mean samples/s": "samples_per_s", "wall time": "wall_s", "goodput": "goodput"}.items():
        assert [item[name] for item in told] == page[label]


# ---------------------------------------------------------------- broken folders

BREAKAGES: dict[str, Callable[[Path], object]] = {
    "no summary": lambda path: (path / "summary.json").unlink(),
    "no events": lambda path: (path / "events.jsonl").unlink(),
    "no metrics": lambda path: (path / "metrics.jsonl").unlink(),
    "nothing but a recipe": lambda path: [
        (path / name).unlink() for name in ("summary.json", "events.jsonl", "metrics.jsonl", ".lock")
    ],
    "half a summary": lambda path: (path / "summary.json").write_text('{"run": "x", "st'),
    "half a line of metrics": lambda path: (path / "metrics.jsonl").write_text('{"step": 1, "metrics": {"train_lo'),
    "empty files": lambda path: [file.write_text("") for file in path.iterdir() if file.is_file()],
    "bytes that are no text": lambda path: [
        file.write_bytes(b"\xff\x00\xfe") for file in path.iterdir() if file.is_file()
    ],
    "other things in the files": lambda path: [
        file.write_text("[1, {}]\n") for file in path.iterdir() if file.is_file()
    ],
    "a date that is none": lambda path: (path / "recipe.yaml").write_text("name: 2020-99-99\n"),
    "metrics that are no numbers": lambda path: (path / "metrics.jsonl").write_text(
        '{"step": 1, "metrics": {"train_loss": NaN, "a": null, "b": "c"}}\n'
    ),
    "times that are none": lambda path: (path / "events.jsonl").write_text('{"event": "start", "time": 1e300}\n'),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_folder_breaks_no_command(two_runs: Path, copy: Path, breakage: str, capfd: Capture) -> None:
    BREAKAGES[breakage](copy)
    good = str(two_runs / "runs" / "tiny-20260102-bbbb")
    for command in (["list"], ["show", copy.name], ["compare", copy.name, good]):
        for more in ([], ["--json"]):
            assert run(["runs", *command, *more]) == 0, (command, more)
            out, err = capfd.readouterr()
            assert "tiny-20260101-aaaa" in out and err == ""
            if more:
                json.loads(out)


def test_what_a_crash_left_is_a_stopped_run_with_the_metrics_so_far(copy: Path, capfd: Capture) -> None:
    (copy / "summary.json").unlink()
    events = (copy / "events.jsonl").read_text().splitlines()[:3]
    (copy / "events.jsonl").write_text("\n".join(events) + '\n{"time": 17')
    metrics = (copy / "metrics.jsonl").read_text().splitlines()[:3]
    (copy / "metrics.jsonl").write_text("\n".join(metrics) + '\n{"step": 6, "ep')
    assert run(["runs", "list", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["status"], found["step"], found["summary"]) == ("stopped", 4, {})
    assert found["metrics"]["train_loss"] == json.loads(metrics[-1])["metrics"]["train_loss"]


# ---------------------------------------------------------------- curves


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([7, 0], "█▁"),
        ([5], "▁"),
        ([5, 5, 5], "▁▁▁"),
        ([-1, 1e-9, 1], "▁▄█"),
    ],
)
def test_a_curve_goes_from_the_least_to_the_most(values: list[float], line: str) -> None:
    assert sparkline(values) == line


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200), st.integers(2, 60))
def test_a_curve_of_any_length_fits(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    assert set(line) <= set("▁▂▃▄▅▆▇█")


def test_a_long_curve_keeps_its_ends() -> None:
    line = sparkline([float(step) for step in range(1000)], 8)
    assert line[0] == "▁" and line[-1] == "█" and sorted(line) == list(line) and len(set(line)) >= 7
