"""`shoal train`: what it prints, what it writes, how it ends."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli.main import run
from shoal.observe.run_folder import RunFolder
from shoal.observe.runs import read_events
from shoal.recipe.load import load_recipe, shipped_recipes
from tests.small_recipes import small
from tests.terminal import terminal
from tests.tiny import TINY, own_recipe, tiny_run, write_own_task, write_tiny

Capture = pytest.CaptureFixture[str]
SECRET = "s3cr3t-h0rse-battery"
PROMISED = {
    *("run", "run_dir", "status", "step", "epoch", "metrics", "weights_sha256", "samples_per_s"),
    *("time_to_first_step_s", "restarts", "resumed_from_step", "world_size", "goodput", "verdict"),
}


@pytest.fixture
def tiny(here: Path) -> str:
    """A recipe file in an otherwise empty working directory."""
    return write_tiny(here).name


def json_of(out: str) -> dict[str, Any]:
    """The one line on stdout."""
    (line,) = out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---------------------------------------------------------------- what a run leaves behind


def test_a_run_leaves_its_recipe_metrics_events_checkpoints_and_summary(tiny: str, capfd: Capture) -> None:
    assert run(["train", tiny, "--run-dir", "out", "--json"]) == 0
    out = Path("out")
    names = {path.name for path in out.iterdir()}
    assert names == {
        *("recipe.yaml", "metrics.jsonl", "workers.jsonl", "events.jsonl", "summary.json", "report.html"),
        *("checkpoints", ".lock"),
    }

    # recipe.yaml: fully resolved, and the same recipe when loaded again
    resolved = yaml.safe_load((out / "recipe.yaml").read_text())
    assert resolved["optim"]["name"] == "adamw" and resolved["train"]["precision"] == "auto"
    assert load_recipe([out / "recipe.yaml"]) == load_recipe([tiny])

    # metrics.jsonl: step, epoch, metrics, seconds by phase
    reports = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(report["step"], "val_loss" in report["metrics"]) for report in reports] == [
        *[(1, False), (2, False), (4, False), (6, False), (6, True), (8, False), (10, False), (12, False), (12, True)]
    ]
    for report in reports:
        assert set(report) == {"time", "step", "epoch", "samples", "metrics", "seconds"}
        assert report["epoch"] == round(report["step"] / 6, 6)
        assert report["seconds"] and all(value > 0 for value in report["seconds"].values())
    training = [report["metrics"] for report in reports if "train_loss" in report["metrics"]]
    assert all(metrics["samples_per_s"] > 0 and metrics["lr"] == 0.01 for metrics in training)

    # events.jsonl: what happened, when, and who worked
    events = read_events(out)
    assert [event["event"] for event in events] == [*("start", "workers", "first_step", "save", "save", "save", "done")]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    (worker,) = events[1]["workers"]
    assert worker.keys() >= {"rank", "pid", "host", "device"}
    assert worker["rank"] == 0 and worker["device"] == "cpu" and isinstance(worker["pid"], int)
    assert [event["step"] for event in events if event["event"] == "save"] == [4, 8, 12]

    # checkpoints: the newest two, each with a manifest
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]
    assert all((path / "manifest.json").is_file() for path in (out / "checkpoints").iterdir())

    # summary.json: what --json printed
    printed = json_of(capfd.readouterr().out)
    assert json.loads((out / "summary.json").read_text()) == printed
    assert printed.keys() >= PROMISED


def test_the_summary_says_how_the_run_went(tiny: str, capfd: Capture) -> None:
    assert run(["train", tiny, "--run-dir", "out", "--json"]) == 0
    summary = json_of(capfd.readouterr().out)
    last = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()][-2:]
    assert summary["run"] == summary["run_dir"] == "out"
    assert (summary["status"], summary["step"], summary["epoch"]) == ("done", 12, 2.0)
    assert summary["metrics"] == {
        "train_loss": last[0]["metrics"]["train_loss"],
        "val_loss": last[1]["metrics"]["val_loss"],
        "val_accuracy": last[1]["metrics"]["val_accuracy"],
    }
    assert re.fullmatch(r"[0-9a-f]{64}", summary["weights_sha256"])
    assert summary["samples_per_s"] > 0 and summary["time_to_first_step_s"] > 0 and 0 <= summary["goodput"] < 1
    assert (summary["restarts"], summary["resumed_from_step"], summary["world_size"]) == (0, None, 1)
    assert summary["verdict"]
    assert "tokens_per_s" not in summary


def test_the_hash_of_the_weights_is_that_of_the_recipe(tiny: str, capfd: Capture) -> None:
    hashes = []
    for name, more in (("a", []), ("b", []), ("c", ["train.micro_batch=16"]), ("d", ["train.seed=1"])):
        assert run(["train", tiny, *more, "--run-dir", name, "--json"]) == 0
        hashes.append(json_of(capfd.readouterr().out)["weights_sha256"])
    assert hashes[0] == hashes[1] == hashes[2] != hashes[3]


def test_where_tokens_are_learned_their_rate_is_told(here: Path, capfd: Capture) -> None:
    overrides = small("shakespeare", here / "data", steps=4) | {"cluster.threads_per_worker": 1}
    words = [f"{key}={value}" for key, value in overrides.items()]
    assert run(["train", "shakespeare", *words, "--json"]) == 0
    summary = json_of(capfd.readouterr().out)
    assert summary["tokens_per_s"] == pytest.approx(16 * summary["samples_per_s"], rel=0.01)
    assert summary["metrics"].keys() == {"train_loss", "val_loss", "val_perplexity"}


def test_a_run_without_a_place_of_its_own_goes_under_runs(tiny: str, capfd: Capture) -> None:
    assert run(["train", tiny, "train.steps=1", "--json"]) == 0
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"tiny-\d{8}-\d{6}-[0-9a-f]{4}", folder.name)
    assert json_of(capfd.readouterr().out)["run_dir"] == str(folder)


# ---------------------------------------------------------------- what it prints


def test_plain_output_is_a_table_on_stdout_and_progress_lines_on_stderr(tiny: str, capfd: Capture) -> None:
    assert run(["train", tiny, "--run-dir", "out [red]"]) == 0
    out, err = capfd.readouterr()
    rows = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in out.splitlines())
    assert rows["status"] == "done" and rows["steps"] == "12 (2 epochs)" and rows["run"] == "out [red]"
    assert re.fullmatch(r"\d+\.\d\d%", rows["val_accuracy"]) and "val_loss" in rows and "verdict" in rows
    assert re.fullmatch(r"\d+\.\d% of \d+\.\d worker-(seconds|hours) were steps that count", rows["goodput"])
    lines = err.splitlines()
    assert lines[0] == "out [red]: 163 parameters on cpu, 96 samples, 12 steps of 16"
    assert lines[1].startswith("step 1/12  epoch 0.17  train_loss ")
    assert lines[-1].startswith("step 12/12  epoch 2.00  val_loss ")
    assert "\x1b" not in out + err and "\r" not in out + err


def test_with_json_everything_but_the_summary_is_on_stderr(tiny: str, capfd: Capture) -> None:
    assert run(["train", tiny, "--json"]) == 0
    out, err = capfd.readouterr()
    assert json_of(out)["status"] == "done"
    assert "step 12/12" in err


def test_with_log_json_every_line_on_stderr_parses(tiny: str, capfd: Capture) -> None:
    assert run(["train", tiny, "--json", "--log-json", "--run-dir", "out"]) == 0
    out, err = capfd.readouterr()
    logged = [json.loads(line) for line in err.splitlines()]
    assert all(record["time"] > 1e9 for record in logged)
    names = [record["event"] for record in logged]
    assert names[0] == "start" and names[-1] == "done" and names.count("report") == 9
    written = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    reports = [record for record in logged if record["event"] == "report"]
    assert [{key: record[key] for key in written[0]} for record in reports] == written
    assert json_of(out)["status"] == "done"


def test_on_a_terminal_a_bar_moves(tiny: str) -> None:
    """The command itself, with a person in front of it."""
    shoal = Path(sys.executable).with_name("shoal")
    with terminal() as screen:
        command = [shoal, "train", tiny, "--run-dir", "out", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=screen.slave, text=True)
        out, _ = process.communicate(timeout=120)
        shown = screen.close()
    assert process.returncode == 0
    assert json_of(out)["status"] == "done"
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"step +12/12 ━+ train_loss \d\.\d+  samples_per_s ", words), words
    assert re.search(r"step 12  epoch 2\.00  val_loss \d\.\d+  val_accuracy \d+\.\d\d%", words)
    assert shown.index("\x1b[?25l") < shown.rindex("\x1b[?25h"), "the cursor comes back"


def test_the_shipped_recipes_are_listed_with_what_they_are(here: Path, capfd: Capture) -> None:
    assert run(["train", "--list"]) == 0
    out, err = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == sorted(shipped_recipes())
    assert all(len(line.split()) > 3 for line in out.splitlines()) and err == ""
    assert run(["train", "--list", "--json"]) == 0
    assert json_of(capfd.readouterr().out) == shipped_recipes()
    assert list(here.iterdir()) == []


# ---------------------------------------------------------------- --dry-run, merging, references


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_dry_run_prints_the_recipe_so_that_it_loads_again(here: Path, name: str, capfd: Capture) -> None:
    assert run(["train", name, "train.seed=7", "--dry-run"]) == 0
    out, err = capfd.readouterr()
    assert err == "" and list(here.iterdir()) == []
    (here / "again.yaml").write_text(out)
    assert load_recipe(["again.yaml"]) == load_recipe([name], ["train.seed=7"])
    assert run(["train", "again.yaml", "--dry-run"]) == 0
    assert capfd.readouterr().out == out


@pytest.mark.parametrize("word", ["1e3", "12e34", "yes", "null", "3", "2020-01-01", "0x1f", "1_000", "~", "true", ".5"])
def test_a_word_that_looks_like_something_else_stays_a_word(here: Path, word: str, capfd: Capture) -> None:
    arguments = ["train", "mnist", f"data.dir='{word}'", "--dry-run"]
    assert run(arguments) == 0
    (here / "again.yaml").write_text(capfd.readouterr().out)
    again = load_recipe(["again.yaml"]).recipe.data
    assert again is not None and again.model_dump()["dir"] == word


def test_a_dry_run_of_a_resume_shows_the_recipe_it_would_go_on_with(tiny: str, capfd: Capture) -> None:
    tiny_run(Path("runs/one"), {"train.steps": 2})
    before = files(Path("runs"))
    assert run(["train", "--resume", "one", "train.steps=9", "--dry-run"]) == 0
    assert yaml.safe_load(capfd.readouterr().out)["train"]["steps"] == 9
    assert files(Path("runs")) == before


def test_several_recipes_are_laid_over_one_another_from_left_to_right(here: Path, capfd: Capture) -> None:
    (here / "base.yaml").write_text(json.dumps(TINY))
    (here / "model.yaml").write_text("model: {hidden: [5, 6]}\ntrain: {epochs: 1, seed: 3}\n")
    (here / "cluster.yaml").write_text("name: merged\ncluster: {threads_per_worker: 2}\ntrain: {seed: 4}\n")
    assert run(["train", "base.yaml", "model.yaml", "optim.lr=3e-4", "cluster.yaml", "--dry-run"]) == 0
    tree = yaml.safe_load(capfd.readouterr().out)
    assert tree["name"] == "merged" and tree["model"]["hidden"] == [5, 6] and tree["optim"]["lr"] == 3e-4
    assert tree["cluster"]["threads_per_worker"] == 2 and tree["cluster"]["gpus_per_worker"] == 0
    assert (tree["train"]["seed"], tree["train"]["epochs"], tree["train"]["steps"]) == (4, 1, None)
    assert tree["train"]["global_batch"] == 16, "what no later recipe says stays"


def test_options_are_overrides_by_another_name(tiny: str, capfd: Capture) -> None:
    assert run(["train", tiny, "--workers", "1", "--gpu", "--dry-run"]) == 0
    cluster = yaml.safe_load(capfd.readouterr().out)["cluster"]
    assert cluster["workers"] == 1 and cluster["gpus_per_worker"] == 1


@pytest.mark.parametrize("workers", ["0", "-1", "1.5", "many", "", "²", "٣"])
def test_a_number_of_workers_that_is_none_is_refused(tiny: str, workers: str, capfd: Capture) -> None:
    assert run(["train", tiny, f"--workers={workers}", "--dry-run"]) == 2
    assert f"error: --workers: {workers!r} should be a whole number above 0" in capfd.readouterr().err


@pytest.mark.parametrize("where", ["environment", ".env"])
@pytest.mark.parametrize("ending", ["done", "failed"])
@pytest.mark.parametrize("log", ["--json", "--log-json"])
def test_a_secret_is_used_and_written_nowhere(
    here: Path, where: str, ending: str, log: str, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    module = f"task_of_secret_{where.strip('.')}_{ending}_{log.strip('-').replace('-', '_')}"
    check = f"assert args['token'] == {SECRET!r} and args['all'] == [{('Bearer ' + SECRET)!r}, 3]"
    write_own_task(here, module, check + ("; model.weight.data += torch.nan" if ending == "failed" else ""))
    recipe = own_recipe(module, token="${env:SHOAL_TOKEN}", all=["Bearer ${env:SHOAL_TOKEN}", "${env:SHOAL_THREE}"])
    recipe["train"]["steps"] = "${env:SHOAL_STEPS}"
    (here / "own.yaml").write_text(json.dumps(recipe))
    values = {"SHOAL_TOKEN": SECRET, "SHOAL_THREE": "3", "SHOAL_STEPS": "4"}
    if where == ".env":
        (here / ".env").write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    else:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
    assert run(["train", "own.yaml", "--run-dir", "out", log]) == (0 if ending == "done" else 1)
    out, err = capfd.readouterr()
    assert run(["train", "own.yaml", "--dry-run"]) == 0
    assert run(["runs", "show", "out"]) == 0
    out += capfd.readouterr().out
    assert SECRET not in out + err
    written = files(here / "out")
    assert written and not any(SECRET.encode() in content for content in written.values())
    tree = yaml.safe_load(written["recipe.yaml"])
    assert tree["task"]["args"] == recipe["task"]["args"], "the references stand where they stood"
    assert tree["train"]["steps"] == "${env:SHOAL_STEPS}"
    assert json.loads(written["summary.json"])["status"] == ending


@pytest.mark.parametrize(
    ("override", "secret", "field"),
    [
        ("optim.lr=${env:SHOAL_TOKEN}", SECRET, "optim.lr"),
        ("optim.name=${env:SHOAL_TOKEN}", SECRET, "optim.name"),
        ("optim=${env:SHOAL_TOKEN}", SECRET, "optim"),
        ("model=${env:SHOAL_TOKEN}", SECRET, "model.name"),
        ("model.name=my-${env:SHOAL_TOKEN}", SECRET, "model.name"),
        ("task=${env:SHOAL_TOKEN}", SECRET, "task.name"),
        ("model.hidden=[1, '${env:SHOAL_TOKEN}']", SECRET, "model.hidden.1"),
        ("model.hidden=${env:SHOAL_TOKEN}", f"[4, {SECRET}]", "model.hidden.1"),
        ("model={name: mlp, wrong: {a: '${env:SHOAL_TOKEN}'}}", SECRET, "model.wrong"),
        ("train={steps: 1, wrong: '${env:SHOAL_TOKEN}'}", SECRET, "train.wrong"),
        ("checkpoint.metric=${env:SHOAL_TOKEN}", SECRET, "checkpoint.metric"),
        ("early_stop.metric=x-${env:SHOAL_TOKEN}", SECRET, "early_stop.metric"),
        ("name=${env:SHOAL_TOKEN}", f"-{SECRET}", "name"),
        ("train.steps=${env:SHOAL_TOKEN}", f"@{SECRET}", "train.steps"),
        ("train.steps=${env:SHOAL_TOKEN}", f"a: b: {SECRET}", "train.steps"),
        ("train.steps=${env:SHOAL_TOKEN}", f"[{SECRET}", "train.steps"),
        ("cluster.gpu_allocator=${env:SHOAL_TOKEN}", SECRET, "cluster.gpu_allocator"),
    ],
)
def test_a_secret_stands_in_no_message(
    tiny: str, override: str, secret: str, field: str, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", secret)
    assert run(["train", tiny, override]) == 2
    out, err = capfd.readouterr()
    assert f"error: {field}: " in err
    assert SECRET not in out + err
    assert [path.name for path in Path().iterdir()] == [tiny]


# ---------------------------------------------------------------- how it ends


def test_an_interrupted_run_is_status_130_and_the_printed_command_goes_on_with_it(here: Path, capfd: Capture) -> None:
    write_own_task(here, "task_of_interrupted", "step == 5 and args['stop'] and os.kill(os.getpid(), signal.SIGINT)")
    for name, stop in (("whole", False), ("stopped", True)):
        (here / f"{name}.yaml").write_text(json.dumps(own_recipe("task_of_interrupted", stop=stop)))
    assert run(["train", "whole.yaml", "--json"]) == 0
    reference = json_of(capfd.readouterr().out)

    assert run(["train", "stopped.yaml", "--run-dir", "a place", "--json"]) == 130
    out, err = capfd.readouterr()
    summary = json_of(out)
    assert (summary["status"], summary["step"]) == ("interrupted", 5) and summary.keys() >= PROMISED
    assert Path("a place/checkpoints/step-00000005/manifest.json").is_file()
    assert "interrupted at step 5; resume with:" in err
    command = err.splitlines()[-1].strip()
    assert command == summary["resume"]

    assert shlex.split(command)[0] == "shoal"
    assert run([*shlex.split(command)[1:], "--json"]) == 0
    final = json_of(capfd.readouterr().out)
    assert (final["status"], final["step"], final["resumed_from_step"]) == ("done", 8, 5)
    assert final["weights_sha256"] == reference["weights_sha256"] and final["metrics"] == reference["metrics"]


def test_an_interruption_before_the_first_step_writes_nothing(here: Path, capfd: Capture) -> None:
    write_own_task(here, "task_of_early_interrupt")
    source = (here / "task_of_early_interrupt.py").read_text()
    source = source.replace(
        "    def model(self): ", "    def model(self):\n        os.kill(os.getpid(), signal.SIGTERM)\n        "
    )
    (here / "task_of_early_interrupt.py").write_text(source)
    (here / "own.yaml").write_text(json.dumps(own_recipe("task_of_early_interrupt")))
    assert run(["train", "own.yaml", "--json"]) == 130
    out, err = capfd.readouterr()
    assert out == "" and err.splitlines()[-1] == "interrupted before anything was written"
    assert not Path("runs").exists()


@pytest.mark.parametrize("kind", ["diverged", "own code"])
def test_a_failed_run_is_status_1_and_its_summary_is_printed_too(here: Path, kind: str, capfd: Capture) -> None:
    module = f"task_of_failed_{kind.replace(' ', '_')}"
    write_own_task(
        here, module, "step == 5 and " + ("model.weight.data.fill_(torch.nan)" if kind == "diverged" else "1 / 0")
    )
    (here / "own.yaml").write_text(json.dumps(own_recipe(module)))
    assert run(["train", "own.yaml", "--run-dir", "out", "--json"]) == 1
    out, err = capfd.readouterr()
    summary = json_of(out)
    assert summary == json.loads(Path("out/summary.json").read_text())
    assert summary.keys() >= PROMISED and summary["status"] == "failed" and summary["weights_sha256"] is None
    if kind == "diverged":
        assert "train loss became nan after step 4 and by step 6" in summary["error"] and "Traceback" not in err
        assert "error: to go on from the last checkpoint: shoal train --resume out" in err
    else:
        assert summary["error"] == "division by zero" and summary["step"] == 4 and "ZeroDivisionError" in err
    failed = read_events(Path("out"))[-1]
    assert failed["event"] == "failed" and failed["message"] == summary["error"]


def test_a_failure_before_there_is_a_folder_still_ends_with_json(here: Path, capfd: Capture) -> None:
    (here / "task_of_early_failure.py").write_text(
        "class Task:\n    def __init__(self): raise OSError('no route to host')\n    def loss(self): pass\n"
    )
    (here / "own.yaml").write_text(json.dumps(own_recipe("task_of_early_failure")))
    assert run(["train", "own.yaml", "--run-dir", "out", "--json"]) == 1
    summary = json_of(capfd.readouterr().out)
    assert summary == {"run": "out", "run_dir": "out", "status": "failed", "error": "no route to host"}
    assert not Path("out").exists()


def test_a_finished_run_resumed_says_so_and_tells_its_summary_again(tiny: str, capfd: Capture) -> None:
    assert run(["train", tiny, "--run-dir", "runs/one", "--json"]) == 0
    first = json_of(capfd.readouterr().out)
    before = files(Path("runs"))
    assert run(["train", "--resume", "one", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json_of(out) == first
    assert "runs/one is already done; to train on, raise train.epochs or train.steps" in err
    assert files(Path("runs")) == before
    assert run(["train", "--resume", "one", "train.steps=14", "--json"]) == 0
    more = json_of(capfd.readouterr().out)
    assert (more["step"], more["resumed_from_step"]) == (14, 12)


@pytest.mark.parametrize(
    ("field", "value"), [("model.hidden", "[9]"), ("train.seed", "1"), ("train.global_batch", "32"), ("data.seed", "1")]
)
def test_a_resume_that_would_be_another_run_is_refused(tiny: str, field: str, value: str, capfd: Capture) -> None:
    tiny_run(Path("runs/one"), {"train.steps": 2})
    before = files(Path("runs"))
    assert run(["train", "--resume", "one", "train.steps=4", f"{field}={value}"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and f"error: {field}: cannot change when a run is resumed" in err
    assert files(Path("runs")) == before


def test_a_run_that_another_process_trains_is_left_alone(tiny: str, capfd: Capture) -> None:
    tiny_run(Path("runs/one"), {"train.steps": 4})
    holder = RunFolder(Path("runs/one"))  # as another process would hold it
    holder.open(4)
    before = files(Path("runs"))
    assert run(["train", "--resume", "one", "train.steps=8"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and "is being trained by another process; stop that one first" in err
    assert files(Path("runs")) == before
    holder.close()
    assert run(["train", "--resume", "one", "train.steps=8"]) == 0
