"""`shoal tune`: wrong input is told and writes nothing, a dry run starts nothing, an interruption loses nothing."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli.main import run
from shoal.launch.api import train
from tests.tiny import write_own_task, write_tiny
from tests.tune.searching import journal, start, summary_of, write_slow

Capture = pytest.CaptureFixture[str]
SPACE = "optim.lr: loguniform(1e-4, 1e-1)\ntrain.global_batch: choice(8, 16)\n"


@pytest.fixture
def files(here: Path) -> Path:
    write_tiny(here)
    (here / "space.yaml").write_text(SPACE)
    (here / "wrong.yaml").write_text("optim.lrr: loguniform(1e-4, 1e-1)\n")
    (here / "broken.yaml").write_text("optim.lr: loguniform(1e-4\n  x: [\n")
    (here / "grid.yaml").write_text("optim.lr: grid(0.1, 0.2)\nmodel.dropout: grid(0.0, 0.1)\n")
    (here / "list.yaml").write_text("- optim.lr\n")
    (here / "empty.yaml").write_text("")
    (here / "letters.yaml").write_text("optim.lr: uniform(a, b)\n")
    (here / "full").mkdir()
    (here / "full" / "file").write_text("")
    return here


def told(files: Path, words: str, capfd: Capture) -> str:
    """What is said to wrong input, which writes and starts nothing."""
    before = sorted(files.rglob("*"))
    assert run(["tune", *words.split()]) == 2
    out, err = capfd.readouterr()
    assert out == "" and "Traceback" not in err
    assert sorted(files.rglob("*")) == before
    complaints = [line for line in err.splitlines() if line.lower().startswith("error: ")]
    assert len(complaints) == 1, err
    return complaints[0][len("error: ") :]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "SPACE: is missing; give a file with lines like optim.lr: loguniform("),
        ("digits", "SPACE: is missing;"),
        ("tiny.yaml optim.lr=3", "RECIPE: give a recipe and a space; there is only 'tiny.yaml'"),
        ("tiny.yaml space.yaml tiny.yaml", "SPACE: 'space.yaml' is one, and comes last; 'tiny.yaml' after"),
        ("tiny.yaml space.yaml train.epochs", "SPACE: 'space.yaml' is one, and comes last; 'train.epochs' after it"),
        ("digits digits", "SPACE: is missing: 'digits' is a recipe"),
        ("tiny.yaml space.yaml optim.lr=0.1", "optim.lr: is searched over, and also set to one value"),
        ("tiny.yaml space.yaml --retry-failed", "--retry-failed: goes with --resume SEARCH"),
        ("tiny.yaml space.yaml --search-dir s3://b/x", "--search-dir: 's3://b/x' is no folder"),
        ("tiny.yaml list.yaml", "space list.yaml: should be lines such as optim.lr: loguniform(1e-5"),
        ("tiny.yaml empty.yaml", "space empty.yaml: is empty; write lines such as optim.lr: loguniform("),
        ("tiny.yaml letters.yaml", "space: optim.lr: uniform takes two numbers.* (given: uniform(a, b))"),
        ("space.yaml", "write: shoal tune digits space.yaml"),
        ("digts space.yaml", "recipe 'digts': neither a file here nor a recipe .*did you mean digits?"),
        ("none.yaml space.yaml", "recipe 'none.yaml'"),
        ("tiny.yaml none.yaml", "space 'none.yaml': no such file; give a .yaml file"),
        ("tiny.yaml full", "space 'full': is a folder"),
        ("tiny.yaml broken.yaml", "space broken.yaml"),
        ("tiny.yaml wrong.yaml", "space: optim.lrr: unknown key; did you mean optim.lr?"),
        ("tiny.yaml space.yaml optim.lrr=1", "optim.lrr: unknown key; did you mean optim.lr?"),
        ("tiny.yaml space.yaml --scheduler ashaa", "Invalid value for '--scheduler': 'ashaa' is not one of"),
        ("tiny.yaml space.yaml tune.scheduler=ashaa", "tune.scheduler: 'ashaa' is not allowed; .*did you mean asha?"),
        ("tiny.yaml space.yaml --search genetic", "Invalid value for '--search'"),
        ("tiny.yaml space.yaml --trials 0", "tune.trials: should be greater than 0 (given: 0); Runs to make"),
        ("tiny.yaml space.yaml --trials many", "Invalid value for '--trials'"),
        ("tiny.yaml grid.yaml --trials 5", "tune.trials: 5 is more than the 4 points of the grid"),
        ("tiny.yaml space.yaml --concurrency 0", "tune.concurrency: should be greater than 0"),
        ("tiny.yaml space.yaml --seed -1", "tune.seed: should be greater than or equal to 0"),
        ("tiny.yaml space.yaml --metric val_los", "tune.metric: 'val_los"),
        ("tiny.yaml space.yaml --metric val_loss:up", "tune.metric: is not understood (given: 'val_loss:up')"),
        ("tiny.yaml space.yaml --metric loss", "tune.metric: 'loss' is reported as val_loss; write that"),
        ("tiny.yaml space.yaml tune.unknown=1", "tune.unknown: unknown key; allowed: "),
        ("tiny.yaml space.yaml tune.trails=3", "tune.trails: unknown key; .*did you mean trials?"),
        ("tiny.yaml space.yaml --search grid", "space: optim.lr: loguniform(0.0001, 0.1) has no end of values"),
        ("tiny.yaml space.yaml --search-dir full", "--search-dir: full is not empty; choose another"),
        ("tiny.yaml space.yaml --search-dir tiny.yaml", "--search-dir: tiny.yaml is a file"),
        ("tiny.yaml space.yaml --workers 2:1", "--workers: '2:1' begins with the larger number"),
        ("tiny.yaml space.yaml cluster.cpus_per_worker=999", "cluster.cpus_per_worker: .* 999 CPU and this machine"),
        ("tiny.yaml space.yaml --address http://x:8265", "--address: 'http://x:8265' should be"),
        ("--resume none", "search 'none': not found; no searches in "),
        ("tiny.yaml space.yaml --resume none", "--resume: goes on with the recipe and the space of that search"),
        ("optim.lr=1 --resume none", "--resume: goes on with the recipe and the space of that search"),
        ("--resume none --search-dir x", "--search-dir: the search goes on in its own folder; leave this out"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_and_writes_nothing(files: Path, words: str, says: str, capfd: Capture) -> None:
    pattern = ".*".join(map(re.escape, says.split(".*")))
    found = told(files, words, capfd)
    assert re.search(pattern, found), found


def test_without_optuna_that_is_told_with_what_to_install(
    files: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "shoal.tune.by_optuna", raising=False)
    found = told(files, "tiny.yaml space.yaml --search optuna", capfd)
    assert found.startswith("--search: optuna needs Optuna: pip install 'shoal[optuna]'")


def test_an_address_that_answers_nobody_is_told_at_once_and_nothing_stays(files: Path, capfd: Capture) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for where in ("", "--search-dir deep/in/here", "--search-dir empty"):
            (files / "empty").mkdir(exist_ok=True)
            found = told(files, f"tiny.yaml space.yaml --address {address} {where}", capfd)
            assert found.startswith(f"--address: no Ray cluster answers at '{address}' (Connection refused)")


def test_a_search_that_is_there_is_not_removed_when_a_resume_cannot_start(files: Path, capfd: Capture) -> None:
    assert run(["tune", "tiny.yaml", "space.yaml", "--dry-run"]) == 0
    (files / "s").mkdir()
    (files / "s" / "search.yaml").write_text(capfd.readouterr().out)
    (files / "s" / "trials").mkdir()
    assert run(["tune", "--resume", "s", "--address", "127.0.0.1:9"]) == 2
    assert (files / "s" / "search.yaml").is_file()


@pytest.mark.parametrize(("words", "shown"), [("", 3), ("--search optuna", 2), ("--trials 20 --scheduler asha", 5)])
def test_a_dry_run_shows_what_would_be_and_starts_nothing(
    files: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, words: str, shown: int
) -> None:
    if "optuna" in words:
        pytest.importorskip("optuna")
    monkeypatch.setattr("shoal.tune.tuning.run_search", lambda *arguments: pytest.fail("it was started"))
    before = sorted(files.rglob("*"))
    fixed = "--trials 3 --seed 5 optim.weight_decay=0.5 tune.keep_checkpoints=2"
    asked = f"tune tiny.yaml space.yaml --dry-run {fixed} {words}"
    assert run(asked.split()) == 0
    out, err = capfd.readouterr()
    assert err == "" and sorted(files.rglob("*")) == before
    tree = yaml.safe_load(out)
    assert tree["recipe"]["optim"]["weight_decay"] == 0.5 and tree["recipe"]["name"] == "tiny"
    assert tree["space"] == {"optim.lr": "loguniform(0.0001, 0.1)", "train.global_batch": "choice(8, 16)"}
    assert (tree["tune"]["seed"], tree["tune"]["keep_checkpoints"]) == (5, 2)
    trials = [line for line in out.splitlines() if line.startswith("# trial")]
    assert len(trials) == shown
    assert all(
        re.fullmatch(rf"# trial {n}: optim\.lr=[\d.e-]+ train\.global_batch=(8|16)", line)
        for n, line in enumerate(trials)
    )
    assert run(asked.split()) == 0
    assert capfd.readouterr().out == out, "the same every time"


HELP = """
import sys
import shoal.cli.main
assert shoal.cli.main.run(["tune", "--help"]) == 0
heavy = {"torch", "numpy", "ray", "sklearn", "optuna", "mlflow", "rich.live"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_explains_and_loads_nothing_heavy(here: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", HELP], cwd=here, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    words = ("--trials", "--scheduler", "asha|hyperband", "--search", "--metric", "--resume", "--json", "--dry-run")
    assert all(word in ended.stdout for word in words) and "shoal tune digits space.yaml" in ended.stdout
    assert list(here.iterdir()) == []


def test_what_no_trial_can_start_without_is_told_once_and_nothing_is_left(files: Path, capfd: Capture) -> None:
    (files / "other.yaml").write_text("task: gone_task:Task\ntrain: {epochs: 1, global_batch: 8}\n")
    assert run(["tune", "other.yaml", "space.yaml", "--metric", "val_loss", "--search-dir", "s"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("error: ") == 1 and "error: task.name: no module named 'gone_task'" in err
    assert not (files / "s").exists()


@pytest.mark.slow
def test_ctrl_c_saves_and_the_printed_command_goes_on_to_the_same_end(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_slow(here, steps=90)
    words = ("slow.yaml", "space.yaml", "--trials", "3", "--concurrency", "2", "--search-dir", "s", "--json")
    process = start(*words, folder=here)
    _wait_for_steps(here / "s", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    summary: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert summary["status"] == "interrupted" and summary["trials_by_status"].get("running") is None
    assert len(summary["trials"]) == 2, "nothing new is begun"
    for record in summary["trials"]:
        own = json.loads((Path(record["run_dir"]) / "summary.json").read_text())
        saved = Path(record["run_dir"]) / "checkpoints" / f"step-{own['step']:08d}" / "manifest.json"
        assert own["status"] in ("interrupted", "done") and own["step"] > 0 and saved.is_file()
    command = re.search(r"^  shoal (tune --resume \S+)$", err, re.MULTILINE)
    assert command is not None, err
    final = summary_of(start(*command[1].split()[1:], "--json", folder=here))
    assert final["status"] == "done" and final["trials_by_status"] == {"done": 3}
    assert [t["config"] for t in final["trials"]][:2] == [t["config"] for t in summary["trials"]]
    assert [t["starts"] for t in final["trials"]] == [2, 2, 1]
    assert final["best"]["value"] == min(trial["value"] for trial in final["trials"])
    write_own_task(here, "slow")  # which is slow no longer
    monkeypatch.syspath_prepend(str(here))
    for trial in final["trials"]:
        alone = train("slow.yaml", trial["config"], progress="silent", launcher="local")
        own = json.loads((Path(trial["run_dir"]) / "summary.json").read_text())
        assert own["weights_sha256"] == alone["weights_sha256"]
    monkeypatch.delitem(sys.modules, "slow")


def _wait_for_steps(folder: Path, process: "subprocess.Popen[str]", within_s: float = 120.0) -> None:
    """Until both trials that run have something to save."""
    deadline = time.monotonic() + within_s
    while sum(event["event"] == "first_step" for event in journal(folder)) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
