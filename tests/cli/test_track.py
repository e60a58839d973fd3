"""`shoal track`: a run that was never tracked, or not to its end, is sent after the fact."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import run
from shoal.core.errors import UserError
from shoal.observe.track.section import TrackSection
from shoal.train.track import Asked, _remember, read_asked
from tests.made_run import make_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def made(here: Path) -> Path:
    return make_run(here / "runs" / "digits-20260101-aaaa")


def test_a_run_that_was_never_tracked_is_sent(made: Path, capfd: Capture) -> None:
    assert run(["track", "digits", "track.tensorboard=true"]) == 0
    out, err = capfd.readouterr()
    assert out == f"tensorboard: all is sent to {made}/tensorboard\n" and err == ""
    assert list((made / "tensorboard").iterdir())
    assert run(["track", str(made), "track.tensorboard=true", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {
        "run": made.name,
        "targets": {"tensorboard": f"{made}/tensorboard"},
        "problems": {},
        "next": {},
    }
    assert run(["track", "digits"]) == 0, "where it was sent before"
    assert capfd.readouterr().out == f"tensorboard: all is sent to {made}/tensorboard\n"


def test_what_is_not_taken_is_said_and_stays(
    made: Path, here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # What packages read from the environment may be in a file.
    (here / ".env").write_text(f"OTEL_EXPORTER_OTLP_ENDPOINT=http://me:hunter2@127.0.0.1:{port}\n")
    assert run(["track", "digits", "track.otlp=true", "--json"]) == 1
    out, err = capfd.readouterr()
    where = f"http://***@127.0.0.1:{port}/v1/traces"
    assert err == f"otlp: not sent: {where}: Connection refused\n" and "hunter2" not in out
    assert json.loads(out)["targets"] == {"otlp": where}
    log = (made / "track" / "log").read_text()
    assert "hunter2" not in log and log.count("Connection refused") == 1 and "Transient" not in log
    assert not (made / "track" / "sent_to.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits"], "track: the run's recipe asks for nothing; say where to, with track.mlflow=true for example"),
        (["digits", "mlflow"], "track: 'mlflow' should look like track.mlflow=true"),
        (["digits", "optim.lr=3"], "optim.lr: only fields of track can be given here, such as track.mlflow=true"),
        (["digits", "track.mlflow.uri=http://a:b@c"], "track.mlflow.uri: holds a password; write ${env:NAME}"),
        (["digits", "track.mlfow=true"], "track.mlfow: unknown key; did you mean track.mlflow?"),
        (["digits", "track.wandb.project=${env:NOT_SET}"], "environment variable NOT_SET is not set"),
        (["nothing"], "run 'nothing': not found"),
    ],
)
def test_wrong_input(made: Path, capfd: Capture, arguments: list[str], words: str) -> None:
    assert run(["track", *arguments]) == 2
    out, err = capfd.readouterr()
    assert words in err and out == "" and len(err.splitlines()) == 1
    assert not (made / "track").exists(), "nothing is written"


@pytest.mark.parametrize(
    ("sink", "given", "is_kept"),
    [
        ("mlflow", {"uri": "http://127.0.0.1:5000", "experiment": "a"}, True),
        ("mlflow", {"uri": "postgresql://me:${env:PASS}@h/db"}, True),
        ("mlflow", {"uri": "http://${env:TOKEN}@h"}, True),
        ("mlflow", {"uri": "http://abc123@h"}, False),
        ("mlflow", {"uri": "http://me:hunter2@h"}, False),
        ("mlflow", {"uri": "http://h:1/?key=abc123"}, False),
        ("otlp", {"endpoint": "http://h:4318", "headers": {"x-team": "${env:TEAM}"}}, True),
        ("otlp", {"endpoint": "http://h:4318", "headers": {"x-team": "abc123"}}, False),
        ("tensorboard", True, True),
    ],
)
def test_where_a_run_was_sent_is_kept_without_secrets(tmp_path: Path, sink: str, given: Any, is_kept: bool) -> None:
    (tmp_path / "track").mkdir()
    _remember(tmp_path, Asked(TrackSection(), str, {sink: given}), [sink])
    kept = tmp_path / "track" / "sent_to.json"
    assert (json.loads(kept.read_text()) if kept.exists() else None) == ({sink: given} if is_kept else None)


def test_a_token_that_is_a_reference_is_no_password(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKX", "abc")
    asked = read_asked(made, ["track.mlflow.uri=http://${env:TOKX}@h"])
    assert asked.section.mlflow is not None and asked.section.mlflow.uri == "http://abc@h"
    with pytest.raises(UserError, match="holds a password"):
        read_asked(made, ["track.mlflow.uri=http://${env:TOKX}:hunter2@h"])
