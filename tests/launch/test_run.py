"""Where a run goes and what it goes on from."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.launch.run import Launch, launch, new_run_dir, prepare
from shoal.observe.console import SilentConsole
from shoal.observe.runs import read_events, read_metrics, read_run, resume_command
from tests.launch.gangs import Watch
from tests.tiny import TINY, own_recipe, tiny_run, write_own_task


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve steps that has ended well."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    tiny_run(path)
    return path


@pytest.fixture
def done(finished: Path, here: Path) -> Path:
    """A copy of it, in an empty working directory."""
    return Path(shutil.copytree(finished, here / "runs" / "done"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def go(prepared: Any) -> dict[str, Any]:
    return launch(prepared, Launch(SilentConsole()))


def test_a_new_run_goes_to_a_folder_of_its_own(here: Path) -> None:
    folders = {prepare([TINY]).run_dir for _ in range(5)}
    assert all(re.fullmatch(r"runs/tiny-\d{8}-\d{6}-[0-9a-f]{4}", str(folder)) for folder in folders)
    assert len(folders) == 5
    assert new_run_dir("x", Path("/elsewhere")).parent == Path("/elsewhere")


def test_a_run_goes_where_it_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here / "home"))
    (here / "empty").mkdir()
    assert prepare([TINY], run_dir="a/b").run_dir == Path("a/b")
    assert prepare([TINY], run_dir=here / "empty").run_dir == here / "empty"
    assert prepare([TINY], run_dir="~/x").run_dir == here / "home" / "x"


def test_preparing_writes_nothing(here: Path) -> None:
    prepare([TINY], ["train.steps=3"], run_dir="a/b")
    prepare()
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"sources": [TINY], "run_dir": "full"}, "--run-dir: full is not empty; choose another$"),
        ({"sources": [TINY], "run_dir": "full/file"}, "--run-dir: full/file is a file"),
        ({"sources": [TINY], "run_dir": "s3://b/x"}, "--run-dir: 's3://b/x' is no folder; to upload to a store"),
        ({"sources": [TINY], "resume": "full"}, "--resume: .*leave out the recipe"),
        ({"run_dir": "new", "resume": "full"}, "--run-dir: .*leave this out with --resume"),
        ({"resume": "full"}, "run 'full': this folder holds no recipe.yaml"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(here: Path, arguments: dict[str, Any], says: str) -> None:
    (here / "full").mkdir()
    (here / "full" / "file").write_text("precious")
    with pytest.raises(UserError, match=says):
        prepare(**arguments)
    assert contents(here) == {"full/file": b"precious"}


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("model.hidden=[9]", "model.hidden"),
        ("model=simple_cnn", "model."),
        ("task.label_smoothing=0.1", "task.label_smoothing"),
        ("data.samples=97", "data.samples"),
        ("data.seed=1", "data.seed"),
        ("train.seed=1", "train.seed"),
        ("optim.name=adam", "optim.name"),
        ("train.global_batch=8", "train.global_batch"),
    ],
)
def test_what_would_make_it_another_run_cannot_change_on_resume(done: Path, override: str, field: str) -> None:
    before = contents(done)
    with pytest.raises(UserError, match=rf"^{field}.*: cannot change when a run is resumed; start a new run"):
        prepare([], [override], resume=done)
    assert contents(done) == before


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=20",
        "train.epochs=3",
        "optim.lr=0.001",
        "checkpoint.keep_last=5",
        "evaluate.every_steps=3",
        "observe.every_steps=1",
        "cluster.threads_per_worker=2",
        "data.workers=1",
        "train.micro_batch=8",
        "train.precision=bf16",
    ],
)
def test_what_leaves_it_the_same_run_may_change_on_resume(done: Path, override: str) -> None:
    more = [] if override.startswith(("train.epochs", "train.steps")) else ["train.steps=20"]
    prepared = prepare([], [override, *more], resume="done")
    assert prepared.resume and prepared.finished is None and prepared.run_dir == Path("runs/done")
    key, value = override.split("=")
    assert str(_at(prepared.loaded.tree(), key)) == value


def _at(tree: dict[str, Any], dotted: str) -> Any:
    value: Any = tree
    for part in dotted.split("."):
        value = value[part]
    return value


def test_giving_the_same_value_again_is_no_change(done: Path) -> None:
    prepared = prepare([], ["model=mlp", "train.seed=0", "train.steps=12"], resume="done")
    assert prepared.finished is not None
    assert prepare([], {"model.hidden": [8]}, resume="done").finished == prepared.finished


def test_a_mistake_in_an_override_is_told_on_resume_too(done: Path) -> None:
    with pytest.raises(UserError, match=r"optim.lrr: unknown key; did you mean optim.lr\?"):
        prepare([], ["optim.lrr=1"], resume="done")


def test_a_finished_run_is_not_touched_and_tells_its_summary_again(done: Path) -> None:
    before = contents(done)
    summary = go(prepare(resume="done"))
    assert summary == json.loads((done / "summary.json").read_text())
    assert contents(done) == before


def test_a_finished_run_can_be_given_more_steps(done: Path) -> None:
    first = json.loads((done / "summary.json").read_text())
    summary = go(prepare([], ["train.steps=20"], resume="done"))
    assert (summary["status"], summary["step"], summary["resumed_from_step"]) == ("done", 20, 12)
    assert summary["weights_sha256"] != first["weights_sha256"]
    assert read_run(done).recipe["train"]["steps"] == 20
    at_once = tiny_run(done.with_name("at-once"), {"train.steps": 20})
    assert at_once["weights_sha256"] == summary["weights_sha256"], "the schedule is constant, so nothing may differ"


def test_a_finished_run_whose_summary_is_lost_makes_it_again(done: Path) -> None:
    before = json.loads((done / "summary.json").read_text())
    (done / "summary.json").write_text('{"run": "do')
    summary = go(prepare(resume="done"))
    assert summary["status"] == "done" and summary["step"] == 12
    assert summary["weights_sha256"] == before["weights_sha256"] and summary["metrics"] == before["metrics"]
    assert json.loads((done / "summary.json").read_text()) == summary


def test_a_run_killed_before_its_first_checkpoint_begins_again_without_a_trace_of_the_first_try(here: Path) -> None:
    reference = tiny_run(here / "runs" / "reference")

    class Dies(SilentConsole):
        def tick(self, step: int) -> None:
            if step == 3:
                raise SystemExit("as if killed")

    prepared = prepare([TINY], run_dir="runs/killed")
    with pytest.raises(SystemExit):
        launch(prepared, Launch(Dies()))
    with Path("runs/killed/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "met')  # the kill came in the middle of a line
    summary = go(prepare(resume="killed"))
    assert summary["resumed_from_step"] is None and summary["weights_sha256"] == reference["weights_sha256"]
    steps = [record["step"] for record in read_metrics(Path("runs/killed"))]
    assert (
        steps == [record["step"] for record in read_metrics(Path("runs/reference"))] == [1, 2, 4, 6, 6, 8, 10, 12, 12]
    )


def test_a_recipe_that_was_spoilt_by_hand_is_told_on_resume(done: Path) -> None:
    (done / "recipe.yaml").write_text("train: [")
    with pytest.raises(UserError, match=r"recipe runs/done/recipe.yaml, line 1: not valid YAML"):
        prepare(resume="done")


def test_references_are_looked_up_again_on_resume(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_own_task(here, "task_of_run_references")
    monkeypatch.setenv("SHOAL_TEST_TOKEN", "first-value")
    recipe = own_recipe("task_of_run_references", token="${env:SHOAL_TEST_TOKEN}")
    go(prepare([recipe], run_dir="runs/own"))
    monkeypatch.setenv("SHOAL_TEST_TOKEN", "second-value")
    prepared = prepare([], ["train.steps=10"], resume="own")
    assert prepared.loaded.recipe.task.model_dump()["args"] == {"token": "second-value"}
    monkeypatch.delenv("SHOAL_TEST_TOKEN")
    with pytest.raises(UserError, match=r"task.args.token: environment variable SHOAL_TEST_TOKEN is not set"):
        prepare(resume="own")


@pytest.mark.parametrize("folder", ["runs/plain", "runs/with space", "it's", "a;b", "$HOME"])
def test_the_command_to_go_on_can_be_pasted_into_a_shell(folder: str) -> None:
    assert shlex.split(resume_command(Path(folder))) == ["shoal", "train", "--resume", folder]


def test_every_start_is_told_with_its_workers(done: Path) -> None:
    go(prepare([], ["train.steps=14"], resume="done"))
    events = read_events(done)
    names = [event["event"] for event in events]
    assert names.count("start") == names.count("workers") == 2
    assert names[names.index("resume") :] == ["resume", "start", "workers", "first_step", "save", "done"]


def test_a_run_that_is_done_goes_on_only_with_more_to_do(here: Path) -> None:
    """Anything else would write another recipe over the one that the weights were trained by."""
    launch(prepare(["digits"], {"train.steps": 4}, run_dir="r"), Launch(SilentConsole()))
    before = {path.name: path.read_text() for path in (here / "r").glob("*.*") if path.is_file()}
    for overrides in (["optim.lr=0.5"], ["train.steps=3"], ["observe.every_steps=7"]):
        with pytest.raises(UserError, match=r"--resume: r is done at step 4; to train on, raise train\.steps above 4"):
            prepare(overrides=overrides, resume="r")
    assert {path.name: path.read_text() for path in (here / "r").glob("*.*") if path.is_file()} == before
    assert prepare(overrides=["train.steps=6", "optim.lr=0.5"], resume="r").finished is None
    assert prepare(resume="r").finished is not None


def test_a_run_that_stopped_early_goes_on_only_with_another_early_stop(here: Path) -> None:
    fields = {"train.steps": 40, "early_stop.patience": 1, "early_stop.min_delta": 1e9, "evaluate.every_steps": 2}
    assert launch(prepare(["digits"], fields, run_dir="r"), Launch(SilentConsole()))["ended_by"] == "early_stop"
    with pytest.raises(UserError, match="to train on, change early_stop"):
        prepare(overrides=["train.steps=80"], resume="r")
    assert prepare(overrides=["early_stop=null"], resume="r").finished is None


@pytest.mark.parametrize(
    ("overrides", "options", "says"),
    [
        ({"cluster.workers": 10_000}, {"launcher": "ray"}, r"cluster.workers: 10000 workers on the \d+ cores of this"),
        ({"cluster.workers": 10_000}, {"launcher": "torchrun"}, r"cluster.workers: 10000 workers on the \d+ cores of"),
        ({"cluster.workers": 10_000}, {"launcher": "local"}, r"cluster.workers: 10000 workers on the \d+ cores of"),
        ({"cluster.workers": 2, "cluster.cpus_per_worker": 5_000}, {"launcher": "ray"}, "2 workers need 10000 CPU and"),
        ({"cluster.workers": 2}, {"address": "nonsense"}, "--address: 'nonsense' should be auto, HOST:PORT or ray://"),
        ({"cluster.workers": 2}, {"address": "http://x:1"}, "http:// addresses are for shoal submit"),
    ],
)
def test_what_cannot_run_here_is_refused_before_anything_starts(
    here: Path, overrides: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    watch = Watch(here / "run")
    few = {"train.global_batch": 20_000, "data.samples": 20_000} if overrides["cluster.workers"] > 2 else {}
    prepared = prepare([TINY], overrides | few, run_dir=here / "run")
    with pytest.raises(UserError, match=says):
        launch(prepared, Launch(watch, watch.stop, **options))
    assert watch.events == [] and list(here.iterdir()) == []


def test_a_folder_is_started_or_gone_on_with(here: Path) -> None:
    """For schedulers that start the same command again."""
    words = {"run_dir": "out", "or_resume": True}
    first = prepare(["digits"], ["train.steps=4"], **words)
    assert not first.resume and first.run_dir == Path("out")
    (here / "out").mkdir()
    assert not prepare(["digits"], ["train.steps=4"], **words).resume  # it had come no further than the folder
    (here / "out" / "recipe.yaml").write_text(first.loaded.to_yaml())
    again = prepare(["digits"], ["train.steps=4"], **words)
    assert again.resume and again.run_dir == Path("out") and again.loaded.recipe == first.loaded.recipe
    assert prepare(["digits"], ["train.steps=9"], **words).loaded.recipe.train.steps == 9  # what may change does
    with pytest.raises(UserError, match="cannot change when a run is resumed"):
        prepare(["mnist"], **words)
    (here / "begun").mkdir()
    (here / "begun" / "events.jsonl").touch()  # killed before it had written its recipe
    assert not prepare(["digits"], run_dir="begun", or_resume=True).resume
    (here / "other").mkdir()
    (here / "other" / "thesis.tex").touch()
    with pytest.raises(UserError, match="is not empty"):
        prepare(["digits"], run_dir="other", or_resume=True)
    with pytest.raises(UserError, match="give it with --run-dir"):
        prepare(["digits"], or_resume=True)
