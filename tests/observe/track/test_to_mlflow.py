import importlib.util
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.observe.track.build import make_followers
from shoal.observe.track.progress import Progress
from shoal.observe.track.section import MlflowSection, TrackSection
from shoal.observe.track.to_mlflow import MlflowParent, MlflowSink
from tests.made_run import BEGAN, make_run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="MLflow is not installed")


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """MLflow tells its makers of its use, unless it is told not to before it is loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield


@pytest.fixture(scope="module")
def database(quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, which take seconds to make."""
    folder = tmp_path_factory.mktemp("mlflow")
    MlflowSink(MlflowSection(uri=f"sqlite:///{folder}/mlflow.db"), folder, Progress(folder / "x", ""), str)
    return folder / "mlflow.db"


@pytest.fixture
def root(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of runs with MLflow's database in it, as it is by default."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    shutil.copyfile(database, tmp_path / "mlflow.db")
    yield tmp_path


def track(run_dir: Path, is_at_work: bool = False, **fields: Any) -> None:
    section = TrackSection(mlflow=MlflowSection(log_model=False, **fields))
    said: list[str] = []
    [follower] = make_followers(run_dir, section, said.append, str)
    assert follower.sync(is_at_work), said


def client(root: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{root}/mlflow.db")


def runs(root: Path) -> list[Any]:
    found = client(root)
    return list(found.search_runs([e.experiment_id for e in found.search_experiments()]))


def test_a_run_as_mlflow_keeps_it(root: Path) -> None:
    track(make_run(root / "digits-a"), tags={"team": "vision"}, parent_run_id="0123")
    [run] = runs(root)
    assert (run.info.run_name, run.info.status, run.info.start_time) == ("digits-a", "FINISHED", (BEGAN + 5) * 1000)
    assert run.info.end_time > run.info.start_time
    assert run.data.params["optim.name"] == "adamw" and run.data.params["train.steps"] == "400"
    tags = run.data.tags
    assert (tags["shoal.status"], tags["shoal.restarts"], tags["shoal.world_size"]) == ("done", "1", "2")
    assert tags["team"] == "vision" and tags["mlflow.parentRunId"] == "0123" and tags["shoal.bottleneck"] == "compute"
    history = client(root).get_metric_history(run.info.run_id, "train_loss")
    assert [metric.step for metric in history] == list(range(10, 401, 10))
    lines = [json.loads(line) for line in (root / "digits-a" / "metrics.jsonl").read_text().splitlines()]
    assert (history[0].value, history[0].timestamp) == (lines[0]["metrics"]["train_loss"], lines[0]["time"] * 1000)
    assert {"val_accuracy", "system/cpu_cores", "system/memory_bytes_max", "seconds/backward"} <= set(run.data.metrics)
    names = {file.path for file in client(root).list_artifacts(run.info.run_id)}
    assert names == {"recipe.yaml", "summary.json", "events.jsonl"}
    assert client(root).get_experiment(run.info.experiment_id).name == "digits"
    assert (root / "mlartifacts" / "digits").is_dir(), "beside the database, not in the working directory"


def test_a_resumed_run_goes_on_in_the_same_run_of_mlflow(root: Path) -> None:
    folder = make_run(root / "run", ended="interrupted", fails_at=None, steps=200)
    track(folder)
    [first] = runs(root)
    assert first.info.status == "KILLED"
    _resume(folder, root)
    track(folder, is_at_work=True)
    [again] = runs(root)
    assert again.info.run_id == first.info.run_id and again.info.status == "RUNNING"
    history = client(root).get_metric_history(again.info.run_id, "train_loss")
    assert [metric.step for metric in history] == list(range(10, 401, 10))
    assert again.data.params["train.steps"] == "400", "a param cannot be changed"
    assert again.data.tags["changed.train.steps"] == "500"


def test_what_was_forgotten_here_is_found_there(root: Path) -> None:
    folder = make_run(root / "run", ended=None)
    track(folder, is_at_work=True)
    shutil.rmtree(folder / "track")  # killed before it could be written down, say
    track(folder, is_at_work=True)
    [run] = runs(root)
    assert len(client(root).get_metric_history(run.info.run_id, "train_loss")) == 40, "and nothing is twice"


def test_a_run_that_is_sent_twice_is_one(root: Path) -> None:
    folder = make_run(root / "run")
    for uri in (None, f"sqlite:///{root}/mlflow.db", f"sqlite:///{root}/../{root.name}/mlflow.db"):
        track(folder, uri=uri)
    [run] = runs(root)
    assert len(client(root).get_metric_history(run.info.run_id, "train_loss")) == 40


def test_a_run_that_was_deleted_there_is_made_anew(root: Path) -> None:
    folder = make_run(root / "run")
    track(folder)
    [run] = runs(root)
    client(root).delete_run(run.info.run_id)
    track(folder)
    [other] = runs(root)
    assert other.info.run_id != run.info.run_id and other.data.metrics


@pytest.mark.parametrize(("ended", "status"), [("failed", "FAILED"), ("interrupted", "KILLED"), (None, "KILLED")])
def test_how_it_ended(root: Path, ended: str | None, status: str) -> None:
    track(make_run(root / "run", ended=ended))
    assert [run.info.status for run in runs(root)] == [status]


def test_no_secret_reaches_mlflow(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.train.track import read_asked

    monkeypatch.setenv("DATA_KEY", "planted-environment")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "planted-password")
    monkeypatch.setenv("TEAM", "planted-team")
    folder = make_run(root / "run", ended=None)
    text = (folder / "recipe.yaml").read_text()
    text += "secret_url: 'http://me:planted-url@host'\nreference: '${env:DATA_KEY}'\napi_token: planted-token\n"
    tracked = "track: {mlflow: {log_model: false, experiment: '${env:TEAM}', tags: {x: 'token=planted-tag'}}}\n"
    (folder / "recipe.yaml").write_text(text.partition("track:")[0] + text.partition("wait_s: 20.0\n")[2] + tracked)
    event = {"time": BEGAN + 99, "event": "failed", "message": "s3://a:planted-event@b; planted-team"}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    (folder / "summary.json").write_text(json.dumps({"error": "password: planted-summary", "step": 1, "metrics": {}}))
    asked = read_asked(folder)
    [follower] = make_followers(folder, asked.section, print, asked.hide)
    assert follower.sync(is_at_work=False)
    [run] = runs(root)
    assert run.data.params["reference"] == "${env:DATA_KEY}" and run.data.params["secret_url"] == "http://***@host"
    stored = [*(root / "mlartifacts").rglob("*"), *(folder / "track").rglob("*")]
    contents = [path.read_bytes() for path in stored if path.is_file()]
    assert len(contents) >= 4
    rows = "\n".join(sqlite3.connect(root / "mlflow.db").iterdump()).replace('INTO "experiments"', "")
    names = [e.name for e in client(root).search_experiments()]
    assert "planted-team" in names, "what is asked for by name is done: the experiment is called so"
    rows = "\n".join(line for line in rows.splitlines() if "planted-team" not in line or "experiments" not in line)
    for planted in ("environment", "password", "url", "token", "tag", "event", "summary"):
        assert f"planted-{planted}" not in rows
        assert not any(f"planted-{planted}".encode() in content for content in contents), planted


def test_long_and_odd_params_are_made_to_fit(root: Path) -> None:
    folder = make_run(root / "run")
    with (folder / "recipe.yaml").open("a") as file:
        file.write(f"long: {'x ' * 4500}\n'odd, name?': 1\nnull_one: null\n")
        file.write("".join(f"field_{number}: {number}\n" for number in range(250)))
    track(folder)
    [run] = runs(root)
    assert 5999 <= len(run.data.params["long"]) <= 6000 and run.data.params["odd_ name_"] == "1"
    assert run.data.params["null_one"] == "null" and run.data.params["field_249"] == "249"


def test_a_model_whose_upload_broke_is_finished_by_the_next_attempt(root: Path) -> None:
    from shoal.train.mlflow_model import _send

    track(make_run(root / "run"))
    [run] = runs(root)
    made = root / "made"
    made.mkdir()
    (made / "MLmodel").write_text("flavors: {}\n")
    broken = client(root)
    broken.log_model_artifacts = lambda *_: (_ for _ in ()).throw(ConnectionError("broke off"))

    def models() -> list[tuple[str, str, str]]:
        found = client(root).search_logged_models([run.info.experiment_id])
        return [(model.model_id, str(model.status), model.tags["shoal.step"]) for model in found]

    for step in (300, 400):  # of a run that has gone on since
        with pytest.raises(ConnectionError):
            _send(broken, run.info.run_id, made, step)
    [(begun, *left)] = models()
    assert left == ["PENDING", "400"], "what nobody will finish is taken away"
    for _ in range(2):
        _send(client(root), run.info.run_id, made, 400)
        assert models() == [(begun, "READY", "400")]
    [output] = client(root).get_run(run.info.run_id).outputs.model_outputs
    assert output.model_id == begun
    assert f"model_id: {begun}" in (made / "MLmodel").read_text()


def _resume(folder: Path, root: Path) -> None:
    """The run goes on from step 200, and is asked for more steps than before."""
    other = make_run(root / "other", fails_at=None, ended=None)
    (folder / "metrics.jsonl").write_text((other / "metrics.jsonl").read_text())
    start = (other / "events.jsonl").read_text().splitlines()[0]
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(json.loads(start) | {"time": BEGAN + 99, "step": 200}) + "\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 400", "steps: 500"))


def parent_of(root: Path, **fields: Any) -> MlflowParent:
    return MlflowParent(MlflowSection(**fields), root / "child", "digits")


def test_a_parent_is_made_once_and_children_are_found_by_it(root: Path) -> None:
    parent = parent_of(root, tags={"team": "vision"})
    run_id = parent.open(None, "search-a", {"shoal.search": "here"})
    track(make_run(root / "digits-a"), parent_run_id=run_id)
    child, own = sorted(runs(root), key=lambda run: run.info.run_id == run_id)
    assert own.info.run_name == "search-a" and own.info.status == "RUNNING"
    assert own.data.tags["team"] == "vision" and own.data.tags["shoal.search"] == "here"
    assert child.data.tags["mlflow.parentRunId"] == run_id and child.info.experiment_id == own.info.experiment_id
    parent.end("done", {"best.optim.lr": "0.1"}, {"best_val_loss": 0.25}, [])
    own = client(root).get_run(run_id)
    assert own.info.status == "FINISHED" and own.data.params == {"best.optim.lr": "0.1"}
    assert own.data.metrics == {"best_val_loss": 0.25}


@pytest.mark.parametrize(("status", "told"), [("failed", "FAILED"), ("interrupted", "KILLED")])
def test_a_parent_that_is_opened_again_goes_on_and_what_changed_is_a_tag(root: Path, status: str, told: str) -> None:
    first = parent_of(root)
    run_id = first.open(None, "search-a", {})
    first.end(status, {"best.optim.lr": "0.1", "best.train.seed": "1"}, {"trials": 3.0}, [])
    assert client(root).get_run(run_id).info.status == told
    again = parent_of(root)
    assert again.open(run_id, "search-a", {}) == run_id and len(runs(root)) == 1
    assert client(root).get_run(run_id).info.status == "RUNNING"
    (root / "best.yaml").write_text("name: x\n")
    found = {"best.optim.lr": "0.2", "best.train.seed": "1", "best.new": "x"}
    again.end("done", found, {"trials": 5.0}, [root / "best.yaml"])
    run = client(root).get_run(run_id)
    assert run.data.params == {"best.optim.lr": "0.1", "best.train.seed": "1", "best.new": "x"}
    assert run.data.tags["changed.best.optim.lr"] == "0.2" and "changed.best.train.seed" not in run.data.tags
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"trials": 5.0})
    assert [file.path for file in client(root).list_artifacts(run_id)] == ["best.yaml"]
    assert (root / "mlartifacts" / "digits").is_dir() and not Path("mlruns").exists()


def test_a_parent_makes_the_database_beside_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    made: list[str] = []
    monkeypatch.setattr("mlflow.tracking.MlflowClient", lambda tracking_uri: made.append(tracking_uri))
    with pytest.raises(AttributeError):  # what comes after that is no client
        MlflowParent(MlflowSection(), tmp_path / "trials" / "0000", "digits")
    assert made == [f"sqlite:///{tmp_path}/trials/mlflow.db"]
    assert (tmp_path / "trials" / ".mlflow.db.lock").exists(), "two that begin together do not both make its tables"
