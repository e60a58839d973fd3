import contextlib
import importlib.util
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.observe.runs import read_events, read_metrics
from shoal.observe.track.progress import Progress
from shoal.observe.track.section import MlflowSection, OtlpSection, TensorBoardSection, TrackSection, WandbSection
from shoal.recipe.load import load_recipe
from shoal.train.track import check_tracking, read_asked, send_now, start_tracking
from tests.made_run import make_run
from tests.tiny import own_recipe, tiny_run, write_own_task

needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="MLflow is not installed")
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
TENSORBOARD = TrackSection(tensorboard=TensorBoardSection(), every_s=0.1, wait_s=30)


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_", "OTEL_"))]:
        monkeypatch.delenv(name)


def recipe_with(folder: Path, **track: Any) -> Path:
    """Lay a track section over the recipe of a run."""
    path = folder / "recipe.yaml"
    text, _, _ = path.read_text().partition("track:")
    path.write_text(text + f"track: {json.dumps(track)}\n")
    return folder


def scalars(folder: Path, name: str = "train_loss") -> list[int]:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    if not (folder / "tensorboard").is_dir():
        return []
    found = EventMultiplexer(size_guidance={"scalars": 0}).AddRunsFromDirectory(str(folder / "tensorboard"))
    found.Reload()
    try:
        return [event.step for event in found.Scalars(".", name)]
    except KeyError:
        return []


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def add_lines(folder: Path, *steps: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"time": time.time(), "step": step, "metrics": {"train_loss": 1.0}}) + "\n")


def add_event(folder: Path, event: str) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "event": event}) + "\n")


def test_a_run_is_followed_beside_and_sent_to_the_end(tmp_path: Path) -> None:
    folder = recipe_with(make_run(tmp_path / "run", ended=None), tensorboard=True, every_s=0.1)
    tracking = start_tracking(folder, TENSORBOARD, pytest.fail)
    assert tracking is not None
    pid = tracking._process.pid
    wait_for(lambda: len(scalars(folder)) == 40)
    assert os.getsid(pid) == pid, "a Ctrl-C for the training is none for it"
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
    add_lines(folder, 410)
    add_event(folder, "done")
    assert tracking.finish() == []
    assert scalars(folder)[-1] == 410 and not is_alive(pid)
    assert "all is sent" in (folder / "track" / "log").read_text()
    assert Progress.read(folder, "tensorboard", str(folder / "tensorboard")).complete


def test_a_real_training_is_tracked(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny-a"
    summary = tiny_run(folder, {"track.tensorboard": True, "track.every_s": 0.2, "track.wait_s": 60})
    written = [record["step"] for record in read_metrics(folder) if "train_loss" in record["metrics"]]
    assert scalars(folder) == written and written[-1] == 12 and scalars(folder, "val_loss") == [6, 12]
    assert summary["status"] == "done" and "all is sent" in (folder / "track" / "log").read_text()


@needs_mlflow
def test_a_training_is_not_held_up_by_a_server_that_never_answers(tmp_path: Path) -> None:
    plain = tiny_run(tmp_path / "plain")
    with _silent_server() as port:
        tracked = {"track.mlflow.uri": f"http://127.0.0.1:{port}", "track.wait_s": 0.5}
        began = time.monotonic()
        summary = tiny_run(tmp_path / "tracked", tracked)
        assert time.monotonic() - began < 20.0
    assert (summary["status"], summary["weights_sha256"]) == ("done", plain["weights_sha256"])
    [warning] = [e for e in read_events(tmp_path / "tracked") if "track.mlflow" in e.get("message", "")]
    assert warning["message"].endswith(f"later: shoal track {tmp_path}/tracked")


def test_nothing_is_started_where_nothing_is_asked_for(tmp_path: Path) -> None:
    assert start_tracking(tmp_path, TrackSection(), pytest.fail) is None
    assert list(tmp_path.iterdir()) == []


@needs_mlflow
def test_a_server_that_never_answers_holds_up_nobody(tmp_path: Path) -> None:
    with _silent_server() as port:
        uri = f"http://me:hunter2@127.0.0.1:{port}"
        folder = recipe_with(make_run(tmp_path / "run"), mlflow={"uri": "${env:URI}"}, tensorboard=True, every_s=0.1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("URI", uri)
            section = TrackSection(mlflow=MlflowSection(uri=uri), tensorboard=TensorBoardSection(), every_s=0.1)
            began = time.monotonic()
            tracking = start_tracking(folder, section, pytest.fail)
            assert time.monotonic() - began < 2.0
        assert tracking is not None
        wait_for(lambda: len(scalars(folder)) == 40)  # the other sink is not held up either
        began = time.monotonic()
        [words] = tracking.finish(1.0)
        assert time.monotonic() - began < 3.0
        assert words.startswith("track.mlflow: not all was sent (track.wait_s was up)") and words.endswith(
            f"later: shoal track {folder}"
        )
        assert not is_alive(tracking._process.pid)
        written = b"".join(path.read_bytes() for path in (folder / "track").iterdir())
        assert b"hunter2" not in written and "hunter2" not in words


def test_what_a_killed_one_has_not_sent_the_next_one_sends(tmp_path: Path) -> None:
    folder = recipe_with(make_run(tmp_path / "run", ended=None), tensorboard=True, every_s=0.1)
    tracking = start_tracking(folder, TENSORBOARD, pytest.fail)
    assert tracking is not None
    kept = folder / "track" / "tensorboard.json"
    wait_for(lambda: len(scalars(folder)) == 40 and '"train_loss": 400' in kept.read_text())
    os.kill(tracking._process.pid, signal.SIGKILL)
    add_lines(folder, 410, 420)
    [words] = tracking.finish()
    assert words.startswith("track.tensorboard: not all was sent (its process ended with status -9")
    add_event(folder, "done")
    assert send_now(folder)["problems"] == {}
    assert scalars(folder) == [*range(10, 401, 10), 410, 420], "all of it, and nothing twice"


def test_it_ends_with_its_parent_and_tells_what_became_of_the_run(tmp_path: Path) -> None:
    folder = recipe_with(make_run(tmp_path / "run", ended=None), tensorboard=True, every_s=0.1)
    with _trainer(folder) as (trainer, pid):
        wait_for(lambda: len(scalars(folder)) == 40)
        add_lines(folder, 410)
        trainer.kill()
        trainer.wait()
        add_lines(folder, 420)  # what it had written before it died
        wait_for(lambda: not is_alive(pid))
    assert scalars(folder)[-2:] == [410, 420]
    assert "all is sent" in (folder / "track" / "log").read_text()
    assert '"complete": true' in (folder / "track" / "tensorboard.json").read_text(), "a run that nobody trains"


def test_the_next_start_takes_over_from_one_whose_parent_was_killed(tmp_path: Path) -> None:
    folder = recipe_with(make_run(tmp_path / "run", ended=None), tensorboard=True, every_s=0.1)
    with _trainer(folder) as (trainer, pid):
        wait_for(lambda: len(scalars(folder)) == 40)
        trainer.kill()
        trainer.wait()
        add_event(folder, "start")
        tracking = start_tracking(folder, TENSORBOARD, pytest.fail)
        assert tracking is not None
        add_lines(folder, 410)
        add_event(folder, "done")
        assert tracking.finish() == [] and not is_alive(pid)
    assert scalars(folder) == [*range(10, 401, 10), 410]


def test_a_disk_without_room_and_a_process_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recipe_with(make_run(tmp_path / "run"), tensorboard=True)
    (folder / "track").write_text("a file where the folder should be")
    told: list[str] = []
    tracking = start_tracking(folder, TENSORBOARD, told.append)
    assert tracking is not None and tracking.finish() == []
    assert len(scalars(folder)) == 40, "how far it is cannot be kept, but all is sent"
    assert told[0].startswith(f"track: {folder}/track cannot be written: ")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert start_tracking(folder, TENSORBOARD, told.append) is None
    assert "could not be started" in told[-1] and told[-1].endswith(f"shoal track {folder}")


def test_only_one_process_follows_a_run(tmp_path: Path) -> None:
    folder = recipe_with(make_run(tmp_path / "run", ended=None), tensorboard=True, every_s=0.1)
    tracking = start_tracking(folder, TENSORBOARD, pytest.fail)
    assert tracking is not None
    wait_for(lambda: len(scalars(folder)) == 40)
    found = send_now(folder)
    assert found["problems"] == {"tensorboard": "another process is sending it, beside its training or by shoal track"}
    tracking.finish()


@needs_mlflow
def test_the_model_is_loaded_by_mlflow_and_predicts(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny-a"
    tiny_run(folder)
    sent = {"targets": {"mlflow": f"sqlite:///{tmp_path}/runs/mlflow.db"}, "problems": {}, "next": {}}
    assert send_now(folder, ["track.mlflow=true"]) == sent
    [ids] = json.loads((folder / "track" / "mlflow.json").read_text()).values()
    script = f"""
        import json, mlflow, numpy as np, sys
        mlflow.set_tracking_uri("sqlite:///{tmp_path}/runs/mlflow.db")
        model = mlflow.pyfunc.load_model("runs:/{ids["ids"]["run_id"]}/model")
        print(json.dumps(model.predict(np.ones((2, 1, 4, 4))).tolist()))
        print(any(name.endswith(".pkl") for _, _, names in __import__("os").walk("{tmp_path}") for name in names))
    """
    predicted, has_pickles = _python(script, cwd=tmp_path)
    import torch

    from shoal.checkpoint.check import newest_whole
    from shoal.checkpoint.read import Tensors

    found, _ = newest_whole(folder / "checkpoints")
    assert found is not None and found.info is not None
    tensors = Tensors(found.info)
    weights = {name.removeprefix("model."): tensors[name] for name in tensors if name.startswith("model.")}
    names = sorted(weights)  # two linear layers: a bias and a weight each
    hidden = torch.nn.functional.linear(torch.ones(2, 16), weights[names[1]], weights[names[0]])
    expected = torch.nn.functional.linear(torch.relu(hidden), weights[names[3]], weights[names[2]])
    assert torch.allclose(torch.tensor(json.loads(predicted)), expected, atol=1e-6)
    assert has_pickles == "False"


@needs_mlflow
@pytest.mark.slow
def test_a_server_that_is_down_gets_all_when_it_is_back(tmp_path: Path) -> None:
    """A real `mlflow server`."""
    port = _free_port()
    uri = f"http://127.0.0.1:{port}"
    folder = recipe_with(make_run(tmp_path / "run", ended=None), mlflow={"uri": uri, "log_model": False}, every_s=0.1)
    section = TrackSection(mlflow=MlflowSection(uri=uri, log_model=False), every_s=0.1)
    tracking = start_tracking(folder, section, pytest.fail)
    assert tracking is not None
    log = folder / "track" / "log"
    wait_for(lambda: log.exists() and "mlflow: not sent, will try again" in log.read_text())
    add_event(folder, "done")
    [words] = tracking.finish(0.5)
    assert words.startswith(f"track.mlflow: not all was sent ({uri}: Connection refused); later: ")
    with _mlflow_server(tmp_path, port):
        assert send_now(folder)["problems"] == {}
        [kept] = json.loads((folder / "track" / "mlflow.json").read_text()).values()
        script = f"""
            import json, mlflow
            client = mlflow.MlflowClient("{uri}")
            run = client.get_run("{kept["ids"]["run_id"]}")
            steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "train_loss")]
            names = sorted(file.path for file in client.list_artifacts(run.info.run_id))
            print(json.dumps([run.info.status, run.data.params["optim.name"], steps, names]))
        """
        status, optimizer, steps, names = json.loads(_python(script, cwd=tmp_path)[-1])
        assert (status, optimizer, steps) == ("FINISHED", "adamw", list(range(10, 401, 10)))
        assert names == ["events.jsonl", "recipe.yaml"]
        add_event(folder, "start")  # the run is resumed, and goes on in the same run of MLflow
        tracking = start_tracking(folder, section, pytest.fail)
        assert tracking is not None
        add_lines(folder, 410)
        wait_for(lambda: '"train_loss": 410' in (folder / "track" / "mlflow.json").read_text())
        add_event(folder, "done")
        assert tracking.finish(30) == []
        [again] = json.loads((folder / "track" / "mlflow.json").read_text()).values()
        assert again["ids"]["run_id"] == kept["ids"]["run_id"]


@needs_mlflow
@pytest.mark.slow
def test_a_run_that_is_interrupted_before_its_first_step_is_killed_in_mlflow(here: Path) -> None:
    write_own_task(here, "slow_task", "import time; time.sleep(600)")
    recipe = own_recipe("slow_task") | {"track": {"mlflow": True, "every_s": 0.2}}
    (here / "own.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "shoal.cli.main", "train", "own.yaml", "--run-dir", "runs/a"]
    training = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(here)}, stderr=subprocess.DEVNULL)
    try:
        kept = here / "runs" / "a" / "track" / "mlflow.json"
        wait_for(lambda: kept.exists() and "run_id" in kept.read_text())
        training.send_signal(signal.SIGINT)
        assert training.wait(20) == 130
    finally:
        training.kill()
        training.wait()

    def rows() -> list[tuple[str, str, bool]]:
        with contextlib.closing(sqlite3.connect(here / "runs" / "mlflow.db")) as database:
            return database.execute("select name, status, end_time is null from runs").fetchall()

    wait_for(lambda: rows() == [("a", "KILLED", False)], 30)
    wait_for(lambda: not (here / "runs" / "a").exists(), 30)


@needs_wandb
def test_wandb_offline(tmp_path: Path) -> None:
    folder = recipe_with(make_run(tmp_path / "run", ended="interrupted", steps=200, fails_at=None))
    overrides = ["track.wandb={mode: offline, project: fish}"]
    found = send_now(folder, overrides)
    assert found["problems"] == {} and found["next"]["wandb"].startswith(f"wandb sync {folder}/wandb/offline-run-*-")
    pattern = found["next"]["wandb"].removeprefix(f"wandb sync {folder}/")
    assert len(list(folder.glob(pattern))) == 1
    add_event(folder, "start")
    add_lines(folder, 210)
    add_event(folder, "done")
    assert send_now(folder, overrides)["problems"] == {}
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and files[0].name == files[1].name, "one run of Weights & Biases, in two parts"
    rows = [_wandb_rows(file) for file in files]
    assert [row["_step"] for row in rows[0] if "train_loss" in row] == list(range(10, 201, 10))
    assert {"val_loss", "train_loss", "seconds/data", "system/cpu_cores"} <= set(rows[0][-1])
    assert [row["_step"] for row in rows[1]] == [210], "nothing twice"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[0][0]["_timestamp"] == pytest.approx(lines[0]["time"])


def test_what_is_missing_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else True)
    with pytest.raises(UserError, match=r"track.wandb: needs wandb: pip install 'shoal\[wandb\]'"):
        check_tracking(load_recipe(["digits"], ["track.wandb=true"]))
    check_tracking(load_recipe(["digits"]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mlflow.uri", "http://me:hunter2@host"),
        ("mlflow.uri", "postgresql://${env:NAME}:hunter2@host/db"),
        ("otlp.endpoint", "http://me:hunter2@host"),
        ("otlp.headers", {"Authorization": "Bearer hunter2"}),
        ("otlp.headers", {"x-api-key": "hunter2"}),
    ],
)
def test_a_password_in_a_recipe_is_refused(field: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "me")
    with pytest.raises(UserError) as caught:
        check_tracking(load_recipe(["digits"], {f"track.{field}": value}))
    assert str(caught.value).startswith(f"track.{field}") and "holds a password; write ${env:NAME}" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "track",
    [
        {"mlflow": {"uri": "http://me:${env:PASSWORD}@host:5000"}},
        {"mlflow": {"uri": "${env:URI}"}},
        {"mlflow": {"uri": "http://host:5000/a:b@c"}},
        {"mlflow": {"uri": "databricks"}},
        {"otlp": {"headers": {"Authorization": "Bearer ${env:PASSWORD}", "x-team": "vision"}}},
    ],
)
def test_a_reference_to_one_is_not(track: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "hunter2")
    monkeypatch.setenv("URI", "http://me:hunter2@host")
    check_tracking(load_recipe(["digits"], {"track": track}))


def test_a_plain_folder_is_refused_because_mlflow_would() -> None:
    for uri in ("mlruns", "file:///tmp/mlruns"):
        with pytest.raises(UserError, match=r"track\.mlflow\.uri: MLflow no longer keeps runs in plain folders"):
            check_tracking(load_recipe(["digits"], {"track.mlflow.uri": uri}))


def test_the_section_is_read_from_a_recipe_that_is_otherwise_out_of_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text("old: 3\ntrack: {otlp: {headers: {authorization: '${env:TOKEN}'}}}\n")
    monkeypatch.setenv("TOKEN", "planted-secret")
    asked = read_asked(tmp_path, ["track.wandb=true"])
    assert asked.section.otlp == OtlpSection(headers={"authorization": "planted-secret"})
    assert asked.section.wandb == WandbSection()
    assert asked.hide("got planted-secret") == "got ${env:TOKEN}"
    with pytest.raises(UserError, match=r"track\.wandbb: unknown key; did you mean track\.wandb\?"):
        read_asked(tmp_path, ["track.wandbb=true"])
    with pytest.raises(UserError, match=r"optim\.lr: only fields of track can be given here"):
        read_asked(tmp_path, ["optim.lr=3"])


@contextlib.contextmanager
def _trainer(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A process that has a run tracked; and the pid of the one beside it."""
    script = f"""
        import time
        from pathlib import Path
        from shoal.observe.track.section import TensorBoardSection, TrackSection
        from shoal.train.track import start_tracking
        section = TrackSection(tensorboard=TensorBoardSection(), every_s=0.1)
        print(start_tracking(Path({str(folder)!r}), section, print)._process.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    try:
        yield trainer, int(trainer.stdout.readline())
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


@contextlib.contextmanager
def _silent_server() -> Iterator[int]:
    """Takes connections and says nothing."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in taken:
                connection.close()


@contextlib.contextmanager
def _mlflow_server(folder: Path, port: int) -> Iterator[None]:
    command = f"{sys.executable} -m mlflow server --host 127.0.0.1 --port {port} --workers 1".split()
    stores = ["--backend-store-uri", f"sqlite:///{folder}/s.db", "--artifacts-destination", str(folder / "artifacts")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    environment |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([*command, *stores], stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        wait_for(lambda: _answers(port), 120)
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(port: int) -> bool:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _python(script: str, cwd: Path) -> list[str]:
    """The last lines that a process of its own prints: MLflow changes the environment of the one it is in."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    environment["MLFLOW_DISABLE_TELEMETRY"] = "true"
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-2:]


def _wandb_rows(path: Path) -> list[dict[str, Any]]:
    """The history in a file of Weights & Biases: protobuf records in the blocks of a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, records, whole, offset = path.read_bytes(), [], b"", 7
    while offset + 7 <= len(content):
        if (left := 32768 - offset % 32768) < 7:
            offset += left
            continue
        length, kind = int.from_bytes(content[offset + 4 : offset + 6], "little"), content[offset + 6]
        whole += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            records.append(Record.FromString(whole))
            whole = b""
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            rows.append(items)
    return rows
