"""`shoal.train(...)`: the same as the command, from Python."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.observe.runs import read_events
from tests.tiny import TINY, own_recipe, write_own_task, write_tiny

Train = Callable[..., dict[str, Any]]
STEPS = {"train.steps": 2}


def test_it_returns_the_summary_that_is_written(train_here: Train) -> None:
    summary = train_here(TINY, run_dir="out")
    assert summary == json.loads(Path("out/summary.json").read_text())
    assert summary["status"] == "done" and summary["step"] == 12 and summary["run_dir"] == "out"


@pytest.mark.parametrize(
    "recipe",
    [
        "synthetic_mlp",
        "tiny.yaml",
        Path("tiny.yaml"),
        TINY,
        [TINY, {"train": {"seed": 3}}],
        ("synthetic_mlp", "tiny.yaml", {"train": {"seed": 3}}),
    ],
    ids=lambda recipe: type(recipe).__name__,
)
def test_a_recipe_is_a_name_a_file_a_mapping_or_several(train_here: Train, recipe: Any) -> None:
    write_tiny(Path())
    overrides = {**STEPS, "data.samples": 64, "data.val_samples": 16, "model.hidden": [4]}
    summary = train_here(recipe, overrides=overrides)
    assert summary["step"] == 2
    (run_dir,) = Path("runs").iterdir()
    assert run_dir.name.startswith("synthetic_mlp-" if recipe == "synthetic_mlp" else "tiny-")
    assert summary["run"] == run_dir.name and summary["run_dir"] == str(run_dir)
    seed = "seed: 3" if isinstance(recipe, list | tuple) else "seed: 0"
    assert seed in (run_dir / "recipe.yaml").read_text()


def test_without_a_recipe_it_trains_digits(train_here: Train) -> None:
    summary = train_here(overrides={**STEPS, "model.channels": [2]})
    assert summary["run"].startswith("digits-")


def test_the_package_itself_is_the_function(here: Path) -> None:
    summary = shoal.train(TINY, ["train.steps=2", "train.seed=1"], run_dir=here / "out", progress="silent")
    assert summary["step"] == 2


def test_progress_goes_to_stderr_unless_silent(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shoal.train(TINY, STEPS, run_dir="a", progress="silent")
    assert capfd.readouterr() == ("", "")
    shoal.train(TINY, STEPS, run_dir="b")
    out, err = capfd.readouterr()
    assert out == "" and "step 2/2" in err
    shoal.train(TINY, STEPS, run_dir="c", progress="json")
    out, err = capfd.readouterr()
    assert out == "" and all(json.loads(line)["time"] for line in err.splitlines())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"recipe": "digts"}, "did you mean digits"),
        ({"recipe": TINY, "overrides": {"optim.lrr": 1}}, "did you mean optim.lr"),
        ({"recipe": TINY, "resume": "x"}, "leave out the recipe"),
        ({"resume": "x"}, "not found"),
        ({"recipe": TINY, "progress": "quiet"}, "progress: 'quiet'"),
        ({"recipe": TINY, "launcher": "rey"}, "launcher: 'rey' is not allowed; .*did you mean ray"),
        ({"recipe": TINY, "launcher": "local", "address": "auto"}, "--address: is for Ray"),
    ],
)
def test_wrong_input_raises_and_writes_nothing(here: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(shoal.UserError, match=says):
        shoal.train(**arguments)
    assert list(here.iterdir()) == []


def test_a_run_that_fails_raises_and_is_written_down(train_here: Train) -> None:
    with pytest.raises(shoal.RunError, match=r"lower optim\.lr"):
        train_here(TINY, overrides={"optim.lr": 1e30, "optim.name": "sgd"}, run_dir="out")
    assert json.loads(Path("out/summary.json").read_text())["status"] == "failed"
    assert read_events(Path("out"))[-1]["event"] == "failed"


def test_an_error_of_the_users_own_code_comes_through_as_it_is(train_here: Train) -> None:
    write_own_task(Path(), "task_of_api_error", "assert step < 3, 'my own mistake'")
    with pytest.raises(AssertionError, match="my own mistake"):
        train_here(own_recipe("task_of_api_error"), run_dir="out")
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["status"] == "failed" and summary["error"] == "my own mistake" and summary["step"] == 2


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_an_interruption_returns_a_summary_and_the_run_can_go_on(train_here: Train, number: str) -> None:
    module = f"task_of_api_{number.lower()}"
    write_own_task(Path(), module, f"step == 5 and args and os.kill(os.getpid(), signal.{number})")
    reference = train_here(own_recipe(module), run_dir="whole")
    summary = train_here(own_recipe(module, interrupt=True), run_dir="out")
    assert (summary["status"], summary["step"], summary["ended_by"]) == ("interrupted", 5, number)
    assert read_events(Path("out"))[-1]["event"] == "interrupted"
    final = train_here(resume=Path("out"))
    assert (final["status"], final["step"], final["resumed_from_step"]) == ("done", 8, 5)
    assert final["weights_sha256"] == reference["weights_sha256"] and final["metrics"] == reference["metrics"]


def test_several_workers_are_a_field_of_the_recipe(train_here: Train) -> None:
    overrides = {"cluster.workers": 2, "data.workers": 1}
    summary = train_here(TINY, overrides=overrides, run_dir="out", launcher="local")
    assert summary["status"] == "done" and summary["world_size"] == 2 and summary["step"] == 12
    assert summary == json.loads(Path("out/summary.json").read_text())
    (workers,) = [event["workers"] for event in read_events(Path("out")) if event["event"] == "workers"]
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert len({worker["pid"] for worker in workers} | {os.getpid()}) == 3, "each in a process of its own"


def test_the_working_directory_of_the_caller_is_not_changed(train_here: Train, here: Path) -> None:
    train_here(TINY, overrides=STEPS)
    assert Path.cwd() == here
