"""A search in MLflow: a parent for its trials, and no harm from a server that is not there."""

import importlib.util
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.tune import tracking
from shoal.tune.setup import Setup, set_up
from shoal.tune.tracking import Tracking
from tests.observe.track import test_to_mlflow as of_runs
from tests.tune.made_trials import by_number, made

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="MLflow is not installed")
quiet, database, client = of_runs.quiet, of_runs.database, of_runs.client
LR = {"optim.lr": "loguniform(1e-5, 1e-2)"}
SUMMARY: dict[str, Any] = {"status": "done", "saved": 0.25, "exploits": 2}


@pytest.fixture
def root(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A search's folder with MLflow's database in it, as it is by default."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_TRACKING")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    (tmp_path / "search" / "trials").mkdir(parents=True)
    (tmp_path / "search" / "mlflow.db").write_bytes(database.read_bytes())
    return tmp_path / "search"


def setup_with(**fields: Any) -> Setup:
    overrides: dict[str, Any] = {"track.mlflow": fields, "checkpoint.metric": "val_loss"}
    return set_up(["digits"], overrides, LR, {})


def untold(words: str) -> None:
    raise AssertionError(words)


def test_trials_are_children_of_one_run_in_one_database(root: Path) -> None:
    found = Tracking(setup_with(tags={"team": "vision"}), root, None, untold)
    assert found.fields == {
        "track.mlflow.parent_run_id": found.run_id,
        "track.mlflow.uri": f"sqlite:///{root}/mlflow.db",
    }
    recipe = found._setup.recipe_of({"optim.lr": 0.5}, found.fields).recipe
    assert recipe.track.mlflow is not None and recipe.track.mlflow.parent_run_id == found.run_id
    run = client(root).get_run(found.run_id)
    assert (run.info.run_name, run.info.status) == ("search", "RUNNING")
    assert run.data.tags["team"] == "vision" and run.data.tags["shoal.space"] == "optim.lr"
    assert client(root).get_experiment(run.info.experiment_id).name == "digits"


def test_at_the_end_it_holds_what_was_found(root: Path) -> None:
    found = Tracking(setup_with(), root, None, untold)
    (root / "best.yaml").write_text("name: digits\n")
    trials = by_number(made(0, [0.5, 0.25], "done", {"optim.lr": 0.001}), made(1, [], "failed", {"optim.lr": 0.1}))
    found.end(trials, SUMMARY)
    run = client(root).get_run(found.run_id)
    assert run.info.status == "FINISHED" and run.data.params == {"best.optim.lr": "0.001"}
    assert run.data.metrics == {"trials": 2.0, "saved": 0.25, "exploits": 2.0, "best_val_loss": 0.25}
    assert [file.path for file in client(root).list_artifacts(found.run_id)] == ["best.yaml"]
    assert (root / "mlartifacts").is_dir(), "beside the database, not in the working directory"


def test_a_resume_goes_on_with_the_same_run(root: Path) -> None:
    first = Tracking(setup_with(), root, None, untold)
    first.end({}, SUMMARY | {"status": "interrupted"})
    assert client(root).get_run(first.run_id).info.status == "KILLED"
    again = Tracking(setup_with(), root, first.run_id, untold)
    assert again.run_id == first.run_id and again.fields["track.mlflow.parent_run_id"] == first.run_id
    assert client(root).get_run(first.run_id).info.status == "RUNNING"


def test_without_mlflow_nothing_happens(tmp_path: Path) -> None:
    found = Tracking(set_up(["digits"], {}, LR, {}), tmp_path, None, untold)
    assert found.fields == {} and found.run_id is None
    found.end({}, SUMMARY)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_was_named_is_left_to_the_trials_own_recipe(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Tracking(setup_with(uri=f"sqlite:///{root}/mlflow.db"), root, None, untold)
    assert found.fields == {"track.mlflow.parent_run_id": found.run_id}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    assert Tracking(setup_with(), root, None, untold).fields.keys() == {"track.mlflow.parent_run_id"}


@pytest.fixture
def port() -> Iterator[Callable[[bool], int]]:
    """`port(is_open)`: one on loopback where nobody listens, or where somebody does and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))

        def found(is_open: bool) -> int:
            if is_open:
                server.listen()
            return int(server.getsockname()[1])

        yield found


@pytest.mark.parametrize(("is_open", "says"), [(False, "Connection refused"), (True, "it did not answer within 1 s")])
def test_a_server_that_refuses_or_hangs_is_told_in_a_line_and_stops_nothing(
    root: Path, port: Callable[[bool], int], monkeypatch: pytest.MonkeyPatch, is_open: bool, says: str
) -> None:
    if is_open:
        monkeypatch.setattr(tracking, "_WITHIN_S", 0.6)
    told: list[str] = []
    began, before = time.monotonic(), dict(os.environ)
    found = Tracking(setup_with(uri=f"http://127.0.0.1:{port(is_open)}"), root, None, told.append)
    assert told == [f"MLflow does not keep the search as a whole: {says}"]
    assert time.monotonic() - began < 20 and dict(os.environ) == before
    assert found.fields == {} and found.run_id is None
    found.end({}, SUMMARY)
    assert len(told) == 1


def test_mlflow_is_told_not_to_try_for_minutes_and_to_keep_its_makers_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str] = {}
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    monkeypatch.setattr(tracking, "MlflowParent", lambda *arguments: seen.update(os.environ))
    told: list[str] = []
    Tracking(setup_with(), root, None, told.append)
    assert (seen["MLFLOW_DISABLE_TELEMETRY"], seen["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]) == ("true", "1")
    assert seen["MLFLOW_HTTP_REQUEST_TIMEOUT"] == os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7", "the user's stays"
    assert "MLFLOW_DISABLE_TELEMETRY" not in os.environ and len(told) == 1


def test_a_server_that_goes_away_later_is_told_and_stops_nothing(root: Path) -> None:
    told: list[str] = []
    found = Tracking(setup_with(), root, None, told.append)
    client(root).delete_run(found.run_id)
    found.end({}, SUMMARY)
    assert len(told) == 1 and told[0].startswith("MLflow does not keep the search as a whole: ")


def test_what_it_says_of_itself_holds_no_secret(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVER", "tok4711://server")
    told: list[str] = []
    found = Tracking(setup_with(uri="${env:MY_SERVER}"), root, None, told.append)
    assert len(told) == 1 and "${env:MY_SERVER}" in told[0] and "4711" not in told[0] + str(found.fields)
